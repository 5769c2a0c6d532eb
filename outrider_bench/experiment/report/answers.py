"""Writes the answer to an experiment's question from its figures, and the lines of its plot."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from outrider_bench.experiment.records import DRAFTED, PLAIN
from outrider_bench.experiment.report.results import SOURCES, Results, Source, Spread, point_words
from outrider_bench.experiment.spec import Cell

Points = list[tuple[float, Spread]]
"""Pairs of a swept number and the speed at it in × plain decoding, in the numbers' order."""


def answers(results: Results) -> list[str]:
    """Return the answer's sentences, the most important first."""
    costs = results.costs
    if not costs and results.experiment.costs:
        costs = results.about["machine"]["processor"].partition(". ")[0]
    return [
        *([f"Costs of predictions: {costs}."] if costs else []),
        *_extremes(rated_cells(results)),
        *_disturbed(results),
        *_texts(results),
        *_predictions(results),
        *_errors(results),
    ]


def rated_cells(results: Results) -> list[tuple[str, Spread]]:
    """Return each drafted cell that is not disturbed: its description, its speed in × plain."""
    found = []
    for cell, source in results.found():
        if results.is_disturbed(cell, source):
            continue
        mark = " (predicted)" if source == "predicted" else ""
        if spread := results.spread(cell, source, DRAFTED, "times_plain"):
            found.append((point_words(cell.point) + mark, spread))
    return found


def _extremes(rated: list[tuple[str, Spread]]) -> Iterator[str]:
    ordered = sorted(rated, key=lambda pair: -pair[1].median)
    named = zip(("highest", "lowest"), ordered[:1] + ordered[1:][-1:], strict=False)
    for name, (label, spread) in named:
        yield f"The {name} speed is that of {label}: {spread.words()} × plain decoding."
    if not rated:
        return
    shown = [(spread.shows, label) for label, spread in rated]
    faster = [label for what, label in shown if what == "faster"]
    slower = [label for what, label in shown if what == "slower"]
    yield f"{len(faster)} of {len(rated)} cells are faster than plain decoding."
    count = f"{len(slower)} of {len(rated)} cells are slower"
    yield f"{count}: {'; '.join(slower)}." if slower else f"{count}."


def _disturbed(results: Results) -> Iterator[str]:
    cells = [
        point_words(cell.point)
        for cell, source in results.found()
        if results.is_disturbed(cell, source)
    ]
    if cells:
        why = "their speed exceeds what their tokens per forward allow"
        yield f"Disturbed, since {why}: {'; '.join(cells)}. Measure these again."


def _texts(results: Results) -> Iterator[str]:
    checked, differing = 0, []
    for cell in results.cells:
        measured = results.measurements.get((cell.key, "measured"), [])
        digests = [found.texts_sha256 for _, found in measured if found.texts_sha256]
        # With synthetic acceptance rates, drafts decide the text.
        exact = "synthetic_acceptance_rates" not in cell.experiment.target.settings
        if exact and cell.experiment.workload.temperature == 0 and len(digests) > 1:
            checked += 1
            if len(set(digests)) > 1:
                differing.append(point_words(cell.point))
    if differing:
        yield f"Greedy texts differ between ways or repetitions in: {'; '.join(differing)}."
    elif checked:
        yield f"Greedy texts are equal across all ways and repetitions in all {checked} cells."


def _predictions(results: Results) -> Iterator[str]:
    """Yield a sentence about the errors of predicted tokens/s, as shares of measured tokens/s."""
    errors = []
    for cell in results.cells:
        for way in (PLAIN, DRAFTED):
            measured = results.spread(cell, "measured", way, "tokens_per_s")
            predicted = results.spread(cell, "predicted", way, "tokens_per_s")
            if measured and predicted:
                errors.append(100 * abs(predicted.median / measured.median - 1.0))
    if errors:
        off = f"{median(errors):.1f} % in the median and {max(errors):.1f} % at worst"
        yield f"Predictions of {len(errors)} speeds are off by {off}."


def _errors(results: Results) -> Iterator[str]:
    errors = [
        f"{point_words(cell.point)}: {error}"
        for cell in results.cells
        for _, measured in results.measurements.get((cell.key, "measured"), [])
        for error in measured.errors
    ]
    if errors:
        yield f"{len(errors)} errors were noted, the first in {errors[0]}."
    missing = len(results.cells) - len(results.found())
    if missing:
        yield f"{missing} of {len(results.cells)} cells have no result yet."


def axis_of(results: Results) -> str | None:
    """Return the path on plots' x axis: a swept round trip, else another number, else None."""
    sweep = results.experiment.sweep
    numeric = [
        path
        for path, values in sweep.items()
        if len(values) > 1 and {*map(type, values)} <= {int, float}
    ]
    trips = [path for path in numeric if path.endswith(".round_trip_ms")]
    return next(iter([*trips, *numeric]), None)


def lines_of(results: Results, path: str) -> list[tuple[str, Source, Points]]:
    """Return the plot's lines: x is the swept number at `path`, and y is × plain.

    There is a line for each source and each combination of the other paths' values.
    """
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
