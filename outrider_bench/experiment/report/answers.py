"""The answer to an experiment's question, in sentences made from figures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from outrider_bench.experiment.records import DRAFTED, IDLE
from outrider_bench.experiment.report.compare import Validation
from outrider_bench.experiment.report.contents import event_words
from outrider_bench.experiment.report.labels import point_words, words
from outrider_bench.experiment.report.ratios import baseline_of
from outrider_bench.experiment.report.results import Results, Source, Spread
from outrider_bench.experiment.report.sweeps import (
    BreakEven,
    axis_of,
    break_evens,
    is_round_trip,
    lines_of,
    points_of,
)
from outrider_bench.experiment.spec import Cell

FLOOR = 0.97
"""Speculation should nowhere be slower than this share of plain decoding."""
_MOST_LINES = 8


@dataclass(frozen=True, slots=True)
class Rated:
    """A drafted cell with its speed over plain decoding."""

    cell: Cell
    source: Source
    times_plain: Spread

    @property
    def label(self) -> str:
        """The cell's point in words, and whether the figure is predicted."""
        return point_words(self.cell.point) + marked(self.source)


def marked(source: Source) -> str:
    """The words that follow a predicted figure; none follow a measured one."""
    if source == "predicted":
        return " (predicted)"
    return ""


def answers(results: Results, validation: Validation | None) -> list[str]:
    """Sentences, the most important first."""
    rated = rated_cells(results)
    return [
        *_distances(results),
        *_turns(results),
        *_recoveries(results),
        *_extremes(rated),
        *_baselines(results),
        *_floor(rated),
        *_demand(results),
        *_idle(results),
        *_texts(results),
        *_errors(results),
        *_validated(validation),
        *_unfinished(results),
    ]


def rated_cells(results: Results) -> list[Rated]:
    """The cells whose drafted speed over plain decoding is known."""
    found = []
    for cell, source in results.found():
        spread = results.spread(cell, source, DRAFTED, "times_plain")
        if spread is not None:
            found.append(Rated(cell, source, spread))
    return found


def _distances(results: Results) -> Iterator[str]:
    """For each line over round trips, speed near and far, and break-even."""
    path = axis_of(results)
    if path is None or not is_round_trip(path):
        return
    known = {(even.label, even.source): even for even in break_evens(results)}
    lines = lines_of(results, path)
    for line in lines[:_MOST_LINES]:
        source = results.source_of(line.cells[0][1])
        even = known.get((line.label, source)) if source is not None else None
        if source is not None and even is not None:
            yield _distance(line.label, path, points_of(results, line, source), even)
    if len(lines) > _MOST_LINES:
        yield f"The plots show {len(lines) - _MOST_LINES} more lines."


def _distance(label: str, path: str, points: list[tuple[float, Spread]], even: BreakEven) -> str:
    middle = min(points[1:-1] or points[-1:], key=lambda point: abs(point[0] - 20.0))
    shown = dict([points[0], middle, points[-1]])
    speeds = [f"{spread.median:.2f} at {words(path, x)}" for x, spread in shown.items()]
    listed = f"{', '.join(speeds[:-1])} and {speeds[-1]}"
    return f"{label}: {listed}, × plain decoding; {even.words()}{marked(even.source)}."


def _extremes(rated: list[Rated]) -> Iterator[str]:
    if not rated:
        return
    best = max(rated, key=lambda one: one.times_plain.median)
    yield f"The fastest cell is {best.label}: {_ranged(best.times_plain)} × plain decoding."
    if len(rated) > 1:
        worst = min(rated, key=lambda one: one.times_plain.median)
        yield f"The slowest cell is {worst.label}: {_ranged(worst.times_plain)} × plain decoding."


def _baselines(results: Results) -> Iterator[str]:
    """The best placement that is not the baseline itself."""
    found = []
    for cell, source in results.found():
        base = baseline_of(results, cell)
        spread = results.spread(cell, source, DRAFTED, "times_baseline")
        if base is not None and base.key != cell.key and spread is not None:
            found.append((spread, cell, base, source))
    if found:
        spread, cell, base, source = max(found, key=lambda one: one[0].median)
        yield (
            f"Beside colocated drafting ({point_words(base.point)}) the fastest placement is "
            f"{point_words(cell.point)}: {_ranged(spread)} × its speed{marked(source)}."
        )


def _floor(rated: list[Rated]) -> Iterator[str]:
    below = [one for one in rated if one.times_plain.median < FLOOR]
    if below:
        named = "; ".join(f"{one.label} ({one.times_plain.median:.2f})" for one in below[:5])
        if len(below) > 5:
            named += f" and {len(below) - 5} more"
        count = f"{len(below)} of {len(rated)} cells are"
        yield f"{count} slower than {FLOOR} of plain decoding: {named}."
    elif rated:
        yield f"No cell of {len(rated)} is slower than {FLOOR} of plain decoding."


def _demand(results: Results) -> Iterator[str]:
    """Tokens/s say little where requests come by themselves, so times per token are given."""
    found = [
        spread.median
        for cell, source in results.found()
        if cell.experiment.workload.arrivals != "closed"
        and (spread := results.spread(cell, source, DRAFTED, "tpot_times_plain")) is not None
    ]
    if found:
        yield (
            "Requests come at times of their own, so tokens/s follow the demand. Plain decoding "
            f"takes {min(found):.2f}–{max(found):.2f} × as long for an output token, by cell."
        )


def _idle(results: Results) -> Iterator[str]:
    found = [
        spread.median
        for cell, source in results.found()
        if (spread := results.spread(cell, source, IDLE, "times_plain")) is not None
    ]
    if found:
        kept = f"{min(found):.2f}–{max(found):.2f}"
        yield f"Plain decoding beside connected, idle drafters keeps {kept} of its speed, by cell."


def _turns(results: Results) -> Iterator[str]:
    for cell, source in results.found():
        spread = results.spread(cell, source, DRAFTED, "times_first_turn", "2")
        place = (cell, source, DRAFTED, "accepted_per_forward")
        first = results.spread(*place, "1")
        second = results.spread(*place, "2")
        if spread is not None and first is not None and second is not None:
            yield (
                f"{point_words(cell.point)}: the second verifier accepts "
                f"{second.median:.2f} draft tokens per forward, the first one {first.median:.2f}: "
                f"{_ranged(spread)} × as many{marked(source)}."
            )


def _recoveries(results: Results) -> Iterator[str]:
    """One sentence for each event of each cell, up to a limit, and one on gaps."""
    sentences = []
    for cell, source in results.found():
        for number, event in enumerate(results.events(cell, source), 1):
            place = (cell, source, DRAFTED)
            times = results.values(*place, f"event_{number}_recovery_s")
            watched = results.values(*place, f"event_{number}_watched_s")
            if watched:
                what = f"{point_words(cell.point)}: {event_words(event)}"
                sentences.append(f"{what}: {_back(times, watched)}{marked(source)}.")
    yield from sentences[: 2 * _MOST_LINES]
    yield from _gaps(results)


def _back(times: list[float], watched: list[float]) -> str:
    """`times` are of the repetitions in which the speed came back, `watched` are of all."""
    if not times and max(watched) < 1.0:
        return "the requests ended too soon after it to see its cost"
    if not times:
        within = f"within the {min(watched):.1f} s of traffic that followed"
        return f"90 % of the speed before it did not come back {within}"
    back = f"90 % of the speed before it is back after {median(times):.1f} s"
    if len(times) == len(watched):
        return back
    count = len(watched) - len(times)
    return f"{back}, in {count} of {len(watched)} repetitions not at all"


def _gaps(results: Results) -> Iterator[str]:
    found = []
    for cell, source in results.found():
        gap = results.spread(cell, source, DRAFTED, "longest_gap_s")
        if results.events(cell, source) and gap is not None:
            found.append((gap, cell, source))
    if found:
        gap, cell, source = max(found, key=lambda one: one[0].most)
        where = f"{point_words(cell.point)}{marked(source)}"
        if gap.most:
            yield f"The longest time without a token is {gap.most:.1f} s, in {where}."
        else:
            yield "In no repetition was a tenth of a second without a token."


def _texts(results: Results) -> Iterator[str]:
    checked, differing = equal_texts(results)
    if differing:
        yield f"Greedy texts differ between ways or repetitions in: {'; '.join(differing)}."
    elif checked:
        yield f"Greedy texts are equal across all ways and repetitions in all {checked} cells."


def equal_texts(results: Results) -> tuple[int, list[str]]:
    """The number of greedy cells whose texts can be compared, and those whose texts differ."""
    checked, differing = 0, []
    for cell in results.cells:
        measured = results.measurements.get((cell.key, "measured"), [])
        digests = [found.texts_sha256 for _, found in measured if found.texts_sha256]
        if cell.experiment.workload.temperature == 0 and len(digests) > 1:
            checked += 1
            if len(set(digests)) > 1:
                differing.append(point_words(cell.point))
    return checked, differing


def _errors(results: Results) -> Iterator[str]:
    errors = [
        (point_words(cell.point), error)
        for cell in results.cells
        for _, measured in results.measurements.get((cell.key, "measured"), [])
        for error in measured.errors
    ]
    if errors:
        label, error = errors[0]
        yield f"{len(errors)} errors were noted, the first in {label}: {error}."


def _validated(validation: Validation | None) -> Iterator[str]:
    if validation is not None:
        yield (
            f"Predictions of {len(validation.rows)} speeds are off by "
            f"{100 * validation.median_error:.1f} % in the median and "
            f"{100 * validation.worst_error:.1f} % at worst."
        )


def _unfinished(results: Results) -> Iterator[str]:
    missing = len(results.cells) - len(results.found())
    if missing:
        yield f"{missing} of {len(results.cells)} cells have no result yet."


def _ranged(spread: Spread) -> str:
    if spread.count == 1:
        return f"{spread.median:.2f}"
    return f"{spread.median:.2f} ({spread.least:.2f}–{spread.most:.2f})"
