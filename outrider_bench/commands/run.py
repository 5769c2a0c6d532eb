"""`outrider lab run FILE`: its flags, and how it ends."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import click

from outrider.errors import invalid
from outrider_bench.commands.entry import INTERRUPTED, entry

RUNS = Path("bench/out/experiments")
"""Where the folders of runs and predictions are, unless a command names another directory."""
_PROGRAM = "outrider lab run"


@entry("run")
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=RUNS,
    help="Directory for the results. Each experiment, machine and commit has a folder in it.",
)
def main(file: Path, out: Path) -> int:
    """Measure the cells of an experiment FILE; docs/placement.md describes it.

    If you start an interrupted run again, it goes on where it stopped.
    """
    command = f"{_PROGRAM} {shlex.join([str(file), '--out', str(out)])}"
    import asyncio

    from rich.console import Console

    from outrider_bench.experiment.processes import StackFailed
    from outrider_bench.experiment.report.answers import answers
    from outrider_bench.experiment.report.results import read
    from outrider_bench.experiment.run import run
    from outrider_bench.experiment.spec import load

    console = Console()
    try:
        experiment = load(file)
        if experiment.costs is not None:
            raise invalid("costs", "is for hardware that is not here; predict this file instead")
        cells = experiment.cells()
        running = run(experiment, cells, out, console, command)
        folder = asyncio.run(running)
    except KeyboardInterrupt:
        console.print(f"stopped; to go on, run the same command again: {command}")
        return INTERRUPTED
    except (StackFailed, OSError) as error:
        print(f"{_PROGRAM}: {error}", file=sys.stderr)
        return 1
    for sentence in answers(read(folder)):
        console.print(f"- {sentence}", markup=False, highlight=False)
    console.print(f"results: {folder.path}", soft_wrap=True)
    console.print(f"tables: outrider lab report {folder.path}", soft_wrap=True)
    return 0
