"""A sweep as axes and lines, and the round trips at which lines cross plain decoding's speed."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from outrider_bench.experiment.records import DRAFTED
from outrider_bench.experiment.report.labels import point_words
from outrider_bench.experiment.report.results import SOURCES, Results, Source, Spread
from outrider_bench.experiment.spec import Cell

Points = list[tuple[float, Spread]]
"""× plain decoding by the numbers of the swept path, in their order."""


def axis_of(results: Results) -> str | None:
    """The path on the x axis of plots: a swept round trip, else another number, else None."""
    sweep = results.experiment.sweep
    numeric = [path for path, values in sweep.items() if len(values) > 1 and _numbers(values)]
    trips = [path for path in numeric if path.endswith(".round_trip_ms")]
    return next(iter([*trips, *numeric]), None)


def lines_of(results: Results, path: str) -> list[tuple[str, Source, Points]]:
    """× plain by the numbers of `path`, for each combination of the other paths and each source."""
    groups: dict[str, list[tuple[float, Cell]]] = {}
    for cell, _ in results.found():
        others = {name: value for name, value in cell.point.items() if name != path}
        key = point_words(others) if others else "drafted"
        groups.setdefault(key, []).append((float(cell.point[path]), cell))
    found = []
    for name, cells in groups.items():
        cells.sort(key=lambda pair: pair[0])
        for source in SOURCES:
            spreads = [(x, results.spread(c, source, DRAFTED, "times_plain")) for x, c in cells]
            points = [(x, spread) for x, spread in spreads if spread is not None]
            if points:
                found.append((name, source, points))
    return found


def break_even_ms(points: Points) -> float | None:
    """The first crossing of 1.0 from above, on straight lines between medians; None without one."""
    for (x, here), (next_x, there) in pairwise(points):
        if here.median >= 1.0 > there.median:
            return x + (here.median - 1.0) / (here.median - there.median) * (next_x - x)
    return None


def _numbers(values: list[Any]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
