"""`outrider lab predict FILE`: its flags."""

from __future__ import annotations

from pathlib import Path

import click

from outrider_bench.commands.entry import entry
from outrider_bench.commands.run import RUNS


@entry("predict")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.option(
    "--profile",
    "paths",
    type=click.Path(path_type=Path),
    multiple=True,
    default=("profile.json",),
    help="File of `outrider lab profile`. Repeat it for more targets; a cell takes the first"
    " profile that fits.",
)
@click.option(
    "--validate",
    type=click.Path(path_type=Path),
    help="Folder of a run of FILE: predictions are written there, and compared with the run.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=RUNS,
    help="Directory for predictions without a run to compare with.",
)
def main(file: Path, paths: tuple[Path, ...], validate: Path | None, out: Path) -> int:
    """Simulate an experiment FILE with a profile's costs, or the cost table that FILE names."""
    from outrider_bench.experiment.predict import run

    print(f"written: {run(file, paths, validate, out)}")
    return 0
