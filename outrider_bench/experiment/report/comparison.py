"""Two runs side by side: the speed of each cell in the second over that in the first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from outrider_bench.console import table_of
from outrider_bench.experiment.records import DRAFTED, PLAIN
from outrider_bench.experiment.report.results import Results, Source, Spread, point_words
from outrider_bench.experiment.spec import Cell
from outrider_bench.intervals import ratio_interval, shown_by

Verdict = Literal["faster", "slower", "cannot tell"]
_FIGURES = (
    ("plain, tokens/s", PLAIN, "tokens_per_s", 1),
    ("drafted, tokens/s", DRAFTED, "tokens_per_s", 1),
    ("drafted, × plain", DRAFTED, "times_plain", 2),
)
# Machines whose loads differ by more processes have speeds that cannot be compared.
_LOAD = 1.0
_NOTE = (
    "Medians of the repetitions; the ratio's 95 % interval is by bootstrap over the repetitions of "
    "both runs. × plain is within each repetition, so it suffers least from machines that differ."
)


@dataclass(frozen=True, slots=True)
class Line:
    """A figure of a cell in both runs."""

    cell: str
    figure: str
    digits: int
    first: Spread
    second: Spread
    ratio: float
    low: float
    high: float
    disturbed: bool
    """Whether one of the two exceeds what its tokens per forward allow, or the runs' loads differ
    and with them all tokens/s."""

    @property
    def verdict(self) -> Verdict:
        """How the second run differs by the interval, which needs several repetitions of a run."""
        both = (self.first, self.second)
        known = all(spread.predicted or spread.count > 1 for spread in both)
        if not known or self.disturbed:
            return "cannot tell"
        return shown_by(self.low, self.high) or "cannot tell"


def lines(first: Results, second: Results) -> Iterator[Line]:
    """The figures that both runs have, of cells with equal values of the sweep."""
    others = {cell.key: (cell, source) for cell, source in second.found()}
    for cell, source in first.found():
        if cell.key in others:
            yield from _of_cell(first, cell, source, second, *others[cell.key])


def _of_cell(
    first: Results, cell: Cell, source: Source, second: Results, other: Cell, its_source: Source
) -> Iterator[Line]:
    for name, way, figure, digits in _FIGURES:
        own = first.values(cell, source, way, figure)
        its = second.values(other, its_source, way, figure)
        if not own or not its:
            continue
        here = Spread.of(own, predicted=source == "predicted")
        there = Spread.of(its, predicted=its_source == "predicted")
        disturbed = way == DRAFTED and (
            first.is_disturbed(cell, source) or second.is_disturbed(other, its_source)
        )
        measured = "measured" in (source, its_source)
        if measured and figure == "tokens_per_s" and _loads_differ(first, second):
            disturbed = True
        ratio = there.median / here.median
        low, high = ratio_interval(its, own)
        words = point_words(cell.point)
        yield Line(words, name, digits, here, there, ratio, low, high, disturbed)


def _loads_differ(first: Results, second: Results) -> bool:
    """Whether one run began beside clearly more other processes; False where that is unknown."""
    loads = [results.about.get("load") for results in (first, second)]
    known = [float(load) for load in loads if load is not None]
    return len(known) == 2 and abs(known[0] - known[1]) > _LOAD


def warnings(first: Results, second: Results) -> Iterator[str]:
    """How machines, commits and experiments differ, and which cells a run lacks."""
    machines = [_fixed(results.about.get("machine") or {}) for results in (first, second)]
    for name in machines[0].keys() | machines[1].keys():
        values = [machine.get(name) for machine in machines]
        if values[0] != values[1]:
            yield f"the machines differ: {name} is {values[0]} and {values[1]}"
    if _loads_differ(first, second):
        loads = [f"{results.about['load']:.1f}" for results in (first, second)]
        words = f"the loads differ: {' and '.join(loads)} processes ran as the runs began"
        yield f"{words}, so tokens/s cannot be compared"
    commits = [results.about.get("commit") for results in (first, second)]
    if commits[0] != commits[1]:
        yield f"the commits differ: {commits[0]} and {commits[1]}"
    experiments = [results.experiment.model_dump(mode="json") for results in (first, second)]
    fields = [name for name in experiments[0] if experiments[0][name] != experiments[1][name]]
    if fields:
        yield f"the experiments differ: {', '.join(fields)}"
    found = [
        {point_words(cell.point): source for cell, source in results.found()}
        for results in (first, second)
    ]
    for key in found[0].keys() ^ found[1].keys():
        yield f"only one run has the cell {key}"
    for key in sorted(found[0].keys() & found[1].keys()):
        if found[0][key] != found[1][key]:
            yield f"{key} is {found[0][key]} in the first run and {found[1][key]} in the second"


def _fixed(machine: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of a machine's record that stay the same from run to run."""
    names = ("host", "processor", "cores", "memory_bytes", "gpus", "torch")
    return {name: machine.get(name) for name in names}


def show(first: Results, second: Results, console: Console) -> None:
    """Print the warnings and the table; raises ValueError if no cell has a figure in both."""
    found = list(lines(first, second))
    if not found:
        raise ValueError(f"{first.folder} and {second.folder} have no cell in common")
    for warning in sorted(warnings(first, second)):
        console.print(Text(f"warning: {warning}"), style="yellow", highlight=False)
    console.print(Text(f"first: {first.folder}"))
    console.print(Text(f"second: {second.folder}"))
    console.print(_table(found))
    console.print(Text(_NOTE))


def _table(found: list[Line]) -> Table:
    columns = ("cell", "figure", "first", "second", "second / first", "the second is")
    table = table_of("", columns, ("figure", "the second is"))
    for line in found:
        ratio = f"{line.ratio:.2f}"
        if line.high > line.low:
            ratio += f" ({line.low:.2f}–{line.high:.2f})"
        verdict = f"{line.verdict}, disturbed" if line.disturbed else line.verdict
        spreads = [spread.words(line.digits) for spread in (line.first, line.second)]
        table.add_row(Text(line.cell), line.figure, *spreads, ratio, verdict)
    return table
