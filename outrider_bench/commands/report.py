"""`outrider lab report FOLDER` and `outrider lab compare FIRST SECOND`: their flags."""

from __future__ import annotations

from pathlib import Path

import click

from outrider_bench.commands.entry import entry

_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


@entry("report")
@click.argument("folder", type=_FOLDER)
def main(folder: Path) -> int:
    """Make tables, a plot and a page of a run's measurements and predictions.

    FOLDER is what `outrider lab run` or `predict` has printed. The files are in its folder
    `report`.
    """
    from outrider_bench.console import console_for_output
    from outrider_bench.experiment.records import Folder
    from outrider_bench.experiment.report.output import write
    from outrider_bench.experiment.report.results import read

    write(read(Folder(folder)), console_for_output())
    return 0


@entry("compare")
@click.argument("first", type=_FOLDER)
@click.argument("second", type=_FOLDER)
def compare(first: Path, second: Path) -> int:
    """Say for each cell of two runs whether the second is faster or slower than the first.

    FIRST and SECOND are folders that `outrider lab run` or `predict` has printed.
    """
    from outrider_bench.console import console_for_output
    from outrider_bench.experiment.records import Folder
    from outrider_bench.experiment.report.comparison import show
    from outrider_bench.experiment.report.results import read

    show(read(Folder(first)), read(Folder(second)), console_for_output())
    return 0
