"""Measures all cells of an experiment on real processes, in an order that treats them alike.

A cell is a combination of the experiment's settings. Repetitions go over all stacks and cells,
alternately forwards and backwards, so that a machine that gets slower or faster affects all cells
alike. The verifier keeps running while drafters start and end. Plain decoding is measured right
before the drafters of the same cells start.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from outrider.gguf import pretrained
from outrider_bench.console import progress
from outrider_bench.experiment import machine, stack
from outrider_bench.experiment.measuring import Bench
from outrider_bench.experiment.records import PLAIN, Folder, ways_of
from outrider_bench.experiment.spec import Cell, Experiment, Target
from outrider_bench.experiment.stack import drafting, in_process_drafters, server
from outrider_bench.experiment.traffic import Encoder

_ROOT = Path(__file__).parents[2]
_Item = TypeVar("_Item")


async def run(
    experiment: Experiment,
    cells: Sequence[Cell],
    out: Path,
    console: Console,
    command: str,
) -> Folder:
    """Measure all missing repetitions, and return the folder with the results.

    Raises OutriderError(INVALID_VALUE) if this machine does not fit the experiment, and OSError or
    StackFailed when a process fails.
    """
    for cell in cells:
        stack.check(cell.experiment)
        machine.check(cell.experiment)
    folder = open_folder(out, experiment, console, command)
    for warning in machine.warnings():
        console.print(f"[yellow]warning:[/] {warning}")
    await measure(experiment, cells, folder, console)
    return folder


def open_folder(out: Path, experiment: Experiment, console: Console, command: str) -> Folder:
    """Return the folder of this machine, commit and experiment; other folders stay unchanged.

    A new folder records the machine, the commit and `command`, the command line.
    """
    here = machine.this_machine()
    commit = machine.commit(_ROOT)
    folder = Folder.of(out, experiment, here, commit)
    others = [other for other in folder.path.parent.glob("*") if other != folder.path]
    if others and not folder.path.exists():
        runs = "1 earlier run was" if len(others) == 1 else f"{len(others)} earlier runs were"
        console.print(f"{runs} of another machine, commit or file; this one does not mix with them")
    folder.begin(
        {
            "machine": dataclasses.asdict(here),
            "load": os.getloadavg()[0],
            "commit": commit,
            "experiment": experiment.model_dump(mode="json"),
            "command": command,
            "began": datetime.now(UTC).isoformat(timespec="seconds"),
        }
    )
    return folder


async def measure(
    experiment: Experiment,
    cells: Sequence[Cell],
    folder: Folder,
    console: Console,
) -> None:
    """Make all measurements that the folder lacks; a bar shows the time left."""
    with progress(console) as bar:
        total = len(missing(experiment, cells, folder))
        task = bar.add_task(experiment.name, total=total)

        def tell(doing: str, finished: int) -> None:
            bar.update(task, description=doing, advance=finished)

        await Runner(experiment, cells, folder, tell).run()


def missing(
    experiment: Experiment, cells: Sequence[Cell], folder: Folder
) -> Sequence[tuple[str, str, int]]:
    """Return the cell, decoding mode and repetition of each missing measurement."""
    return [
        (cell.key, way, repetition)
        for cell in cells
        for way in ways_of(cell)
        for repetition in range(experiment.repetitions)
        if not folder.has(cell.key, way, repetition)
    ]


def groups(cells: Sequence[Cell]) -> list[list[list[Cell]]]:
    """Group the cells that one verifier can serve; within a group, group them by drafters."""
    found: dict[str, dict[str, list[Cell]]] = {}
    for cell in cells:
        found.setdefault(cell.target_key, {}).setdefault(cell.stack_key, []).append(cell)
    return [list(stacks.values()) for stacks in found.values()]


def there_and_back(items: Sequence[_Item], round_number: int) -> Iterator[_Item]:
    """Return the items in order in even rounds, and in reverse order in odd rounds.

    Thus drift of the machine affects all items alike.
    """
    if round_number % 2 == 0:
        return iter(items)
    return reversed(items)


class Runner:
    """Makes all measurements that a folder lacks."""

    def __init__(
        self,
        experiment: Experiment,
        cells: Sequence[Cell],
        folder: Folder,
        tell: Callable[[str, int], None],
    ) -> None:
        """`tell` gets a description of the work, and how many measurements have just ended."""
        self._experiment = experiment
        self._groups = groups(cells)
        self._folder = folder
        self._tell = tell

    async def run(self) -> None:
        """Make the measurements; raise StackFailed if a process does not start or ends early."""
        for repetition in range(self._experiment.repetitions):
            for stacks in there_and_back(self._groups, repetition):
                await self._with_target(stacks, repetition)

    async def _with_target(self, stacks: list[list[Cell]], repetition: int) -> None:
        """Measure all cells of one target."""
        cells = [cell for cells in stacks for cell in cells]
        if not any(self._lacks(cell, way, repetition) for cell in cells for way in ways_of(cell)):
            return
        experiment = cells[0].experiment
        model = _target_model(experiment.target)
        encoder = Encoder(model)
        self._tell(f"{repetition + 1}: starting the verifier", 0)
        in_process = in_process_drafters(experiment, model)
        async with server(experiment.target, model, in_process) as running:
            for cells in there_and_back(stacks, repetition):
                bench = Bench(running, None, encoder)
                await self._plain(cells, repetition, bench)
                await self._drafted(cells, repetition, bench)

    async def _plain(self, cells: list[Cell], repetition: int, bench: Bench) -> None:
        """Measure plain decoding once for each workload, for all cells with that workload.

        Plain decoding uses no link, so the cells do not differ.
        """
        for alike in self._by_workload(cells, PLAIN, repetition):
            first = alike[0]
            self._tell(f"{repetition + 1}: {first.key}, plain", 0)
            await bench.warm_up(first.experiment, PLAIN)
            found = await bench.measure(first.experiment, PLAIN, _tenant(first, PLAIN, repetition))
            for cell in alike:
                self._folder.save(cell.key, repetition, found)
            self._tell(f"{repetition + 1}: {first.key}, plain", len(alike))

    def _by_workload(self, cells: list[Cell], way: str, repetition: int) -> list[list[Cell]]:
        """Return the cells that lack a measurement of this mode, grouped by their workloads."""
        found: dict[str, list[Cell]] = {}
        for cell in cells:
            if self._lacks(cell, way, repetition):
                found.setdefault(cell.experiment.workload.model_dump_json(), []).append(cell)
        return list(found.values())

    async def _drafted(self, cells: list[Cell], repetition: int, bench: Bench) -> None:
        """Measure one cell after the other, with its links' shapes."""
        lacking = [
            (cell, way)
            for cell in there_and_back(cells, repetition)
            for way in ways_of(cell)
            if way != PLAIN and self._lacks(cell, way, repetition)
        ]
        if not lacking:
            return
        self._tell(f"{repetition + 1}: {lacking[0][0].key}, starting drafters", 0)
        async with drafting(cells[0].experiment, bench.server) as running:
            bench.drafting = running
            for cell, way in lacking:
                self._tell(f"{repetition + 1}: {cell.key}, {way}", 0)
                await running.shape(cell.experiment)
                await bench.warm_up(cell.experiment, way)
                tenant = _tenant(cell, way, repetition)
                found = await bench.measure(cell.experiment, way, tenant)
                self._folder.save(cell.key, repetition, found)
                self._tell(f"{repetition + 1}: {cell.key}, {way}", 1)

    def _lacks(self, cell: Cell, way: str, repetition: int) -> bool:
        return not self._folder.has(cell.key, way, repetition)


def _tenant(cell: Cell, way: str, repetition: int) -> str:
    return f"{cell.key}.{way}.{repetition}"


def _target_model(target: Target) -> Path:
    """Return the directory of the target's model. A grown model is made first."""
    if not target.grown:
        return Path(pretrained(str(target.model)))
    from outrider_bench.grown import modest_target

    return modest_target(target.model, "bfloat16" if target.dtype == "auto" else target.dtype)
