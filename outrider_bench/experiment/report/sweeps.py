"""A sweep as axes and lines, and the round trips at which lines cross plain decoding's speed."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from outrider_bench.experiment.records import DRAFTED
from outrider_bench.experiment.report.labels import point_words, titles, unit
from outrider_bench.experiment.report.results import SOURCES, Results, Source, Spread
from outrider_bench.experiment.spec import Cell


@dataclass(frozen=True, slots=True)
class Line:
    """Cells that differ in one numeric path alone, in its order."""

    label: str
    point: dict[str, Any]
    """The values of the other paths."""
    cells: list[tuple[float, Cell]]


@dataclass(frozen=True, slots=True)
class BreakEven:
    """The round trip at which a line of drafted decoding falls to plain decoding's speed.

    `at_ms` is interpolated between two round trips. It is None if the line does not cross; then
    `faster` tells on which side it lies. `clear` tells whether all repetitions at the round trip
    behind the crossing were slower than plain decoding.
    """

    label: str
    point: dict[str, Any]
    source: Source
    at_ms: float | None
    least_ms: float
    most_ms: float
    faster: bool
    clear: bool

    def words(self) -> str:
        """One clause that follows the drafter's name."""
        if self.at_ms is not None:
            doubt = ", within the spread of the repetitions"
            if self.clear:
                doubt = ""
            return f"breaks even at {self.at_ms:.3g} ms{doubt}"
        if self.faster:
            return f"has no break-even up to {self.most_ms:g} ms"
        return f"is slower than plain decoding already at {self.least_ms:g} ms"

    def short_words(self) -> str:
        """The same for the label of a bar."""
        if self.at_ms is not None:
            return f"{self.at_ms:.3g} ms" + ("" if self.clear else " (within spread)")
        if self.faster:
            return f"none up to {self.most_ms:g} ms"
        return f"slower already at {self.least_ms:g} ms"


def axis_of(results: Results) -> str | None:
    """The path on the x axis of plots: a swept round trip, else another number, else None."""
    sweep = results.experiment.sweep
    numeric = [path for path, values in sweep.items() if len(values) > 1 and _numbers(values)]
    trips = [path for path in numeric if is_round_trip(path)]
    return next(iter([*trips, *numeric]), None)


def is_round_trip(path: str) -> bool:
    """Whether a path's numbers are round trips."""
    return path.endswith(".round_trip_ms")


def axis_title(path: str) -> str:
    """The title of a path's axis, with its unit."""
    words = [titles([path])[path], unit(path)]
    return ", ".join(word for word in words if word)


def lines_of(results: Results, path: str) -> list[Line]:
    """The cells with results, grouped by their values of all other paths."""
    groups: dict[str, Line] = {}
    for cell, _ in results.found():
        others = {name: value for name, value in cell.point.items() if name != path}
        key = point_words(others)
        line = groups.setdefault(key, Line(key if others else "drafted", others, []))
        line.cells.append((float(cell.point[path]), cell))
    for line in groups.values():
        line.cells.sort(key=lambda pair: pair[0])
    return list(groups.values())


def points_of(results: Results, line: Line, source: Source) -> list[tuple[float, Spread]]:
    """× plain along a line, at the points that this source has."""
    found = [(x, results.spread(cell, source, DRAFTED, "times_plain")) for x, cell in line.cells]
    return [(x, spread) for x, spread in found if spread is not None]


def break_evens(results: Results) -> list[BreakEven]:
    """The break-even of each line over round trips, by source; needs two points of a line."""
    path = axis_of(results)
    if path is None or not is_round_trip(path):
        return []
    found = []
    for line in lines_of(results, path):
        for source in SOURCES:
            points = points_of(results, line, source)
            if len(points) > 1:
                found.append(break_even(line, source, points))
    return found


def break_even(line: Line, source: Source, points: list[tuple[float, Spread]]) -> BreakEven:
    """The first crossing of 1.0 from above, on straight lines between medians."""
    least, most = points[0][0], points[-1][0]
    faster = points[0][1].median >= 1.0
    for (x, here), (next_x, there) in pairwise(points):
        if faster and there.median < 1.0:
            share = (here.median - 1.0) / (here.median - there.median)
            at = x + share * (next_x - x)
            clear = there.most < 1.0
            return BreakEven(line.label, line.point, source, at, least, most, True, clear)
    return BreakEven(line.label, line.point, source, None, least, most, faster, True)


def _numbers(values: list[Any]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
