"""`outrider lab report FOLDER`: its flags."""

from __future__ import annotations

from pathlib import Path

import click

from outrider.process.usage import invoke, refuse

_PROGRAM = "outrider lab report"


def main(arguments: list[str]) -> int:
    """Make the report of a run; returns the exit status."""
    status: int = invoke(_command, _PROGRAM, arguments)
    return status


@click.command(_PROGRAM)
@click.argument("path", metavar="FOLDER", type=click.Path(exists=True, path_type=Path))
def _command(path: Path) -> int:
    """Make tables, a plot and a page of a run's measurements and predictions.

    FOLDER is what `outrider lab run` or `predict` has printed. The files are in its folder
    `report`.
    """
    from outrider_bench.console import console_for_output
    from outrider_bench.experiment.records import Folder
    from outrider_bench.experiment.report.output import write
    from outrider_bench.experiment.report.results import read

    try:
        results = read(Folder(path))
    except ValueError as error:
        refuse(_PROGRAM, str(error))
    write(results, console_for_output())
    return 0
