"""The answer to an experiment's question, in sentences made from figures."""

from __future__ import annotations

from collections.abc import Iterator

from outrider_bench.experiment.records import DRAFTED
from outrider_bench.experiment.report.labels import point_words
from outrider_bench.experiment.report.results import Results, Source, Spread
from outrider_bench.experiment.report.sweeps import axis_of, break_even_ms, lines_of
from outrider_bench.experiment.spec import Cell

FLOOR = 0.97
"""Speculation should nowhere be slower than this share of plain decoding."""

Rated = list[tuple[str, Spread]]
"""Drafted cells in words, with their speed over plain decoding."""


def answers(results: Results) -> list[str]:
    """Sentences, the most important first."""
    rated = rated_cells(results)
    return [
        *_distances(results),
        *_extremes(rated),
        *_baselines(results),
        *_texts(results),
        *_errors(results),
        *_unfinished(results),
    ]


def rated_cells(results: Results) -> Rated:
    """The cells whose drafted speed over plain decoding is known."""
    found = [
        (_label(cell, source), results.spread(cell, source, DRAFTED, "times_plain"))
        for cell, source in results.found()
    ]
    return [(label, spread) for label, spread in found if spread is not None]


def _label(cell: Cell, source: Source) -> str:
    return point_words(cell.point) + (" (predicted)" if source == "predicted" else "")


def _distances(results: Results) -> Iterator[str]:
    """For each line over round trips, its speeds and its break-even."""
    path = axis_of(results)
    if path is None or not path.endswith(".round_trip_ms"):
        return
    for name, source, points in lines_of(results, path):
        speeds = ", ".join(f"{spread.median:.2f} at {x:g} ms" for x, spread in points)
        even = break_even_ms(points)
        if even is not None:
            words = f"breaks even at {even:.3g} ms"
        elif points[0][1].median >= 1.0:
            words = "has no break-even within the sweep"
        else:
            words = "is slower than plain decoding from the start"
        mark = " (predicted)" if source == "predicted" else ""
        yield f"{name}: {speeds}, × plain decoding; {words}{mark}."


def _extremes(rated: Rated) -> Iterator[str]:
    ordered = sorted(rated, key=lambda pair: -pair[1].median)
    named = zip(("fastest", "slowest"), ordered[:1] + ordered[1:][-1:], strict=False)
    for name, (label, spread) in named:
        yield f"The {name} cell is {label}: {spread.words()} × plain decoding."
    below = [label for label, spread in rated if spread.median < FLOOR]
    if below:
        count = f"{len(below)} of {len(rated)} cells are"
        yield f"{count} slower than {FLOOR} of plain decoding: {'; '.join(below)}."
    elif rated:
        yield f"No cell of {len(rated)} is slower than {FLOOR} of plain decoding."


def _baselines(results: Results) -> Iterator[str]:
    """The best placement that is not the baseline itself."""
    found = []
    for cell, source in results.found():
        base = results.baseline_of(cell)
        spread = results.spread(cell, source, DRAFTED, "times_baseline")
        if base is not None and base.key != cell.key and spread is not None:
            found.append((spread, _label(cell, source), point_words(base.point)))
    if found:
        spread, label, base_words = max(found, key=lambda one: one[0].median)
        yield (
            f"Beside colocated drafting ({base_words}) the fastest placement is {label}: "
            f"{spread.words()} × its speed."
        )


def _texts(results: Results) -> Iterator[str]:
    checked, differing = 0, []
    for cell in results.cells:
        measured = results.measurements.get((cell.key, "measured"), [])
        digests = [found.texts_sha256 for _, found in measured if found.texts_sha256]
        if cell.experiment.workload.temperature == 0 and len(digests) > 1:
            checked += 1
            if len(set(digests)) > 1:
                differing.append(point_words(cell.point))
    if differing:
        yield f"Greedy texts differ between ways or repetitions in: {'; '.join(differing)}."
    elif checked:
        yield f"Greedy texts are equal across all ways and repetitions in all {checked} cells."


def _errors(results: Results) -> Iterator[str]:
    errors = [
        f"{point_words(cell.point)}: {error}"
        for cell in results.cells
        for _, measured in results.measurements.get((cell.key, "measured"), [])
        for error in measured.errors
    ]
    if errors:
        yield f"{len(errors)} errors were noted, the first in {errors[0]}."


def _unfinished(results: Results) -> Iterator[str]:
    missing = len(results.cells) - len(results.found())
    if missing:
        yield f"{missing} of {len(results.cells)} cells have no result yet."
