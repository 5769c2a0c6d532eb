"""`outrider lab report FOLDER`: its flags."""

from __future__ import annotations

from pathlib import Path

import click

from outrider_bench.commands.entry import entry


@entry("report")
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
def main(folder: Path) -> int:
    """Make tables, a plot and a CSV of a run's measurements and predictions.

    FOLDER is the path that `outrider lab run` or `outrider lab predict` has printed. The files go
    into the folder `report` in FOLDER.
    """
    from outrider_bench.console import console_for_output
    from outrider_bench.experiment.records import Folder
    from outrider_bench.experiment.report.output import write
    from outrider_bench.experiment.report.results import read

    write(read(Folder(folder)), console_for_output())
    return 0
