"""Measures the cells of an experiment in an order that treats them alike.

Repetitions go over all stacks and cells forwards and backwards in turn, so that a machine that gets
slower or faster affects all alike. Verifiers run on while drafters come and go. Plain decoding is
measured right before its cells' drafters start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from outrider_bench.experiment.measuring import Bench
from outrider_bench.experiment.places import Places
from outrider_bench.experiment.records import DRAFTED, PLAIN, Folder
from outrider_bench.experiment.spec import Cell, Experiment, Target
from outrider_bench.experiment.stack import backend, drafting, own_head
from outrider_bench.experiment.traffic import Encoder
from outrider_bench.rounds import there_and_back

_Item = TypeVar("_Item")
Tell = Callable[[str, int], None]
"""Shows progress: the present work, and the number of measurements that it finished."""


def ways_of(cell: Cell) -> list[str]:
    """The ways in which a cell is measured."""
    return [PLAIN, DRAFTED] if cell.experiment.use else [PLAIN]


def groups(cells: Sequence[Cell]) -> list[list[list[Cell]]]:
    """Cells by the verifiers that can serve them, and within these by the drafters."""
    found: dict[str, dict[str, list[Cell]]] = {}
    for cell in cells:
        found.setdefault(cell.target_key, {}).setdefault(cell.stack_key, []).append(cell)
    return [list(stacks.values()) for stacks in found.values()]


class Runner:
    """Measures all that a folder lacks."""

    def __init__(
        self,
        experiment: Experiment,
        cells: Sequence[Cell],
        folder: Folder,
        places: Places,
        target_model: Callable[[Target], Path],
        tell: Tell,
    ) -> None:
        """`target_model` gives the directory of the target's model."""
        self._experiment = experiment
        self._groups = groups(cells)
        self._folder = folder
        self._places = places
        self._target_model = target_model
        self._tell = tell

    async def run(self) -> None:
        """Measure; raises StackFailed when a process does not start, or ends too early."""
        for repetition in range(self._experiment.repetitions):
            for stacks in there_and_back(self._groups, repetition):
                await self._with_target(stacks, repetition)

    async def _with_target(self, stacks: list[list[Cell]], repetition: int) -> None:
        """Measure all cells of one target."""
        cells = [cell for stack in stacks for cell in stack]
        if not any(self._lacks(cell, way, repetition) for cell in cells for way in ways_of(cell)):
            return
        experiment = cells[0].experiment
        model = self._target_model(experiment.target)
        encoder = Encoder(model)
        self._tell(f"{repetition + 1}: starting verifiers", 0)
        head = own_head(experiment, model)
        async with backend(experiment.target, model, self._places, head) as running:
            for stack in there_and_back(stacks, repetition):
                bench = Bench(running, None, encoder)
                await self._plain(stack, repetition, bench)
                await self._drafted(stack, repetition, bench)

    async def _plain(self, stack: list[Cell], repetition: int, bench: Bench) -> None:
        """Measure plain decoding once for each workload, for all cells with that workload.

        Plain decoding uses no link, so the cells do not differ.
        """
        by_workload: dict[str, list[Cell]] = {}
        for cell in stack:
            if self._lacks(cell, PLAIN, repetition):
                by_workload.setdefault(cell.experiment.workload.model_dump_json(), []).append(cell)
        for cells in by_workload.values():
            first = cells[0]
            self._tell(f"{repetition + 1}: {first.key}, plain", 0)
            await bench.warm_up(first.experiment, PLAIN)
            found = await bench.measure(first.experiment, PLAIN, _tenant(first, PLAIN, repetition))
            for cell in cells:
                self._folder.save(cell.key, repetition, found)
            self._tell(f"{repetition + 1}: {first.key}, plain", len(cells))

    async def _drafted(self, stack: list[Cell], repetition: int, bench: Bench) -> None:
        """Measure one cell after the other, with its links' shapes."""
        lacking = [
            (cell, way)
            for cell in there_and_back(stack, repetition)
            for way in ways_of(cell)
            if way != PLAIN and self._lacks(cell, way, repetition)
        ]
        if not lacking:
            return
        self._tell(f"{repetition + 1}: {lacking[0][0].key}, starting drafters", 0)
        async with drafting(stack[0].experiment, bench.backend, self._places) as running:
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
