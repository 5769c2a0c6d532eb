"""`outrider lab report FOLDER` and `outrider lab compare FIRST SECOND`: their flags."""

from __future__ import annotations

from pathlib import Path

import click

from outrider.process.usage import invoke, refuse

_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


def main(arguments: list[str]) -> int:
    """Make the report of a run; returns the exit status."""
    status: int = invoke(_report, "outrider lab report", arguments)
    return status


def compare(arguments: list[str]) -> int:
    """Print two runs side by side; returns the exit status."""
    status: int = invoke(_compare, "outrider lab compare", arguments)
    return status


@click.command()
@click.argument("folder", type=_FOLDER)
def _report(folder: Path) -> int:
    """Make tables, a plot and a page of a run's measurements and predictions.

    FOLDER is what `outrider lab run` or `predict` has printed. The files are in its folder
    `report`.
    """
    from outrider_bench.console import console_for_output
    from outrider_bench.experiment.records import Folder
    from outrider_bench.experiment.report.output import write
    from outrider_bench.experiment.report.results import read

    try:
        results = read(Folder(folder))
    except ValueError as error:
        refuse("outrider lab report", str(error))
    write(results, console_for_output())
    return 0


@click.command()
@click.argument("first", type=_FOLDER)
@click.argument("second", type=_FOLDER)
def _compare(first: Path, second: Path) -> int:
    """Say for each cell of two runs whether the second is faster or slower than the first.

    FIRST and SECOND are folders that `outrider lab run` or `predict` has printed.
    """
    from outrider_bench.console import console_for_output
    from outrider_bench.experiment.records import Folder
    from outrider_bench.experiment.report.comparison import show
    from outrider_bench.experiment.report.results import read

    try:
        show(read(Folder(first)), read(Folder(second)), console_for_output())
    except ValueError as error:
        refuse("outrider lab compare", str(error))
    return 0
