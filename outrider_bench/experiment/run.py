"""Measures all cells of an experiment on real processes."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from outrider_bench.console import progress
from outrider_bench.experiment import machine, stack
from outrider_bench.experiment.places import Places, places
from outrider_bench.experiment.records import Folder
from outrider_bench.experiment.report.answers import answers
from outrider_bench.experiment.report.results import read
from outrider_bench.experiment.schedule import Runner, ways_of
from outrider_bench.experiment.spec import Cell, Experiment, Target

_ROOT = Path(__file__).parents[2]


async def run(
    experiment: Experiment,
    cells: Sequence[Cell],
    out: Path,
    console: Console,
    command: str,
    *,
    compose: bool,
) -> None:
    """Measure all missing repetitions, and print the answer.

    Raises OutriderError(INVALID_VALUE) if this machine or the places do not fit the experiment, and
    OSError or StackFailed when a process, a machine or the engine fails.
    """
    experiments = [cell.experiment for cell in cells]
    async with places(experiments, machine.commit(_ROOT), compose=compose) as found:
        for cell in cells:
            machine.check(cell.experiment)
            stack.check(cell.experiment, found)
        folder = open_folder(out, experiment, console, command, found)
        for warning in machine.warnings():
            console.print(f"[yellow]warning:[/] {warning}")
        await measure(experiment, cells, folder, found, console)
    for sentence in answers(read(folder)):
        console.print(f"- {sentence}", markup=False, highlight=False)
    console.print(f"results: {folder.path}", soft_wrap=True)
    console.print(f"tables: outrider lab report {folder.path}", soft_wrap=True)


def open_folder(
    out: Path,
    experiment: Experiment,
    console: Console,
    command: str,
    found: Places | None = None,
) -> Folder:
    """The folder of these machines, commit and experiment; results of others are left alone.

    A new folder records the machine, the commit and `command`, the command line.
    """
    here = machine.this_machine()
    commit = machine.commit(_ROOT)
    about: Mapping[str, str] = {}
    if found is not None:
        about = found.about
    version = f"{commit}-{found.digest}" if found is not None and about else commit
    folder = Folder.of(out, experiment, here, version)
    others = [other for other in folder.path.parent.glob("*") if other != folder.path]
    if others and not folder.path.exists():
        runs = "1 earlier run was" if len(others) == 1 else f"{len(others)} earlier runs were"
        console.print(f"{runs} of another machine, commit or file; this one does not mix with them")
    folder.begin(
        {
            "machine": dataclasses.asdict(here),
            "load": os.getloadavg()[0],
            "commit": commit,
            "places": dict(about),
            "experiment": experiment.model_dump(mode="json"),
            "command": command,
            "began": datetime.now(UTC).isoformat(timespec="seconds"),
        }
    )
    return folder


def target_model(target: Target) -> Path:
    """The directory of the target's model. A grown model is made first."""
    if not target.grown:
        return target.model
    from outrider.launch.grow import MODEST
    from outrider_bench.grown import grown_checkpoint

    dtype = target.dtype
    if target.dtype == "auto":
        dtype = "bfloat16"
    return grown_checkpoint(target.model, Path("bench/out"), MODEST, dtype)


async def measure(
    experiment: Experiment, cells: Sequence[Cell], folder: Folder, places: Places, console: Console
) -> None:
    """Measure all that the folder lacks; a bar shows the time left."""
    with progress(console) as bar:
        task = bar.add_task(experiment.name, total=len(missing(experiment, cells, folder)))

        def tell(doing: str, finished: int) -> None:
            bar.update(task, description=doing, advance=finished)

        await Runner(experiment, cells, folder, places, target_model, tell).run()


def missing(
    experiment: Experiment, cells: Sequence[Cell], folder: Folder
) -> Sequence[tuple[str, str, int]]:
    """Cell, way and repetition of all missing measurements."""
    return [
        (cell.key, way, repetition)
        for cell in cells
        for way in ways_of(cell)
        for repetition in range(experiment.repetitions)
        if not folder.has(cell.key, way, repetition)
    ]
