"""Plots of time lines with events, of verifiers in turn, and of prediction beside measurement."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from outrider_bench.experiment.records import DRAFTED, PLAIN
from outrider_bench.experiment.report.compare import Validation
from outrider_bench.experiment.report.drawing import (
    COLOURS,
    MARKERS,
    Picture,
    grid,
    ink,
    picture,
    with_source,
)
from outrider_bench.experiment.report.labels import point_words
from outrider_bench.experiment.report.results import Results, Source
from outrider_bench.experiment.report.timeline import TENTHS_PER_S, smoothed
from outrider_bench.experiment.spec import Cell

_MOST_PANELS = 8
_WAY_COLOURS = {PLAIN: "#999999", DRAFTED: COLOURS[0]}

Lines = dict[str, list[list[int]]]
"""Timelines of the repetitions by way."""


def time_pictures(results: Results) -> Iterator[Picture]:
    """tokens/s by tenths of a second for cells with events."""
    found = [pair for pair in results.found() if results.events(*pair)]
    every = [(cell, source, _lines(results, cell, source)) for cell, source in found]
    shown = [one for one in every if one[2]]
    if shown:
        caption = (
            "Tokens per second during the traffic, each the mean of the half second before; thin "
            "lines are repetitions, the thick line is their mean, and shaded times are events."
        )
        drawn = shown[:_MOST_PANELS]
        yield picture("timeline", "Time line", caption, lambda: _timelines(results, drawn))


def turn_pictures(results: Results) -> Iterator[Picture]:
    """Draft tokens accepted per forward, a bar for each verifier that has a turn."""
    bars = {}
    for cell, source in results.found():
        turns = list(_turns(results, cell, source))
        if cell.experiment.workload.verifiers == "in-turn" and len(turns) > 1:
            bars[with_source(point_words(cell.point), source)] = turns
    if bars:
        caption = "Draft tokens accepted per forward, by the first verifier and by those after it."
        yield picture("turns", "Verifiers in turn", caption, lambda: _turn_bars(bars))


def validation_pictures(validation: Validation | None) -> Iterator[Picture]:
    """Errors of predicted tokens/s, with bands of 5 and 12 %."""
    if validation is not None:
        caption = (
            "Error of the predicted tokens/s by the measured ones, a mark for each cell and way: "
            "above 0 the prediction is too fast; the bands are errors of up to 5 and 12 %."
        )
        yield picture(
            "validation", "Predicted and measured", caption, lambda: _validation(validation)
        )


def _lines(results: Results, cell: Cell, source: Source) -> Lines:
    lines: Lines = {}
    for _, measured in results.measurements[cell.key, source]:
        if measured.timeline and measured.way in _WAY_COLOURS:
            lines.setdefault(measured.way, []).append(measured.timeline)
    if DRAFTED in lines:
        return lines
    return {}


def _timelines(results: Results, shown: list[tuple[Cell, Source, Lines]]) -> Figure:
    figure = Figure(figsize=(9.0, 0.9 + 2.5 * len(shown)), layout="constrained")
    all_axes = figure.subplots(len(shown), squeeze=False)
    for (cell, source, lines), axes in zip(shown, all_axes[:, 0], strict=True):
        for way, repetitions in lines.items():
            _draw_way(axes, way, repetitions)
        highest = axes.get_ylim()[1]
        _mark_events(axes, results.events(cell, source), highest)
        name = ""
        if cell.point:
            name = point_words(cell.point)
        axes.set_title(with_source(name, source), fontsize=10, loc="left")
        axes.set_ylabel("tokens/s")
        axes.set_ylim(0, 1.25 * highest)
        axes.set_xlim(left=0)
        grid(axes)
    all_axes[-1, 0].set_xlabel("seconds since the first request")
    handles, texts = all_axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, texts, loc="outside lower center", ncols=2, frameon=False)
    return figure


def _draw_way(axes: Axes, way: str, repetitions: list[list[int]]) -> None:
    colour = _WAY_COLOURS[way]
    for timeline in repetitions:
        rates = smoothed(timeline)
        axes.plot(_seconds(rates), rates, color=colour, linewidth=0.7, alpha=0.4)
    # The mean ends with the shortest repetition. Later ones would be means of fewer repetitions.
    columns = zip(*repetitions, strict=False)
    means = smoothed([sum(column) / len(column) for column in columns])
    axes.plot(_seconds(means), means, color=colour, linewidth=2.0, label=way)


def _seconds(rates: Sequence[float]) -> list[float]:
    return [(place + 1) / TENTHS_PER_S for place in range(len(rates))]


def _mark_events(axes: Axes, events: Sequence[Mapping[str, Any]], highest: float) -> None:
    for number, event in enumerate(events):
        at = float(event["at"])
        end = at + float(event.get("seconds", 0.0))
        if end > at:
            axes.axvspan(at, end, color=COLOURS[1], alpha=0.18, linewidth=0)
        axes.axvline(at, color=COLOURS[1], linewidth=1.2)
        # The heights alternate, so that the words of neighbours do not overlap.
        height = highest * (1.13 if number % 2 else 1.02)
        text = f"{event['what']} of {event['who']}"
        # The box keeps the grid out of the words.
        box = {"facecolor": axes.get_facecolor(), "edgecolor": "none", "pad": 1.0}
        axes.annotate(text, (at, height), (5, 0), textcoords="offset points", bbox=box)


def _turns(results: Results, cell: Cell, source: Source) -> Iterator[float]:
    number = 1
    while spread := results.spread(cell, source, DRAFTED, "accepted_per_forward", str(number)):
        yield spread.median
        number += 1


def _turn_bars(bars: dict[str, list[float]]) -> Figure:
    most = max(map(len, bars.values()))
    figure = Figure(figsize=(8.0, 1.6 + 0.3 * most * len(bars)), layout="constrained")
    axes = figure.subplots()
    height = 0.8 / most
    for turn in range(most):
        places = [place + (turn - (most - 1) / 2) * height for place in range(len(bars))]
        values = [turns[turn] if turn < len(turns) else 0.0 for turns in bars.values()]
        colour, label = COLOURS[turn % len(COLOURS)], f"turn {turn + 1}"
        drawn = axes.barh(places, values, height, color=colour, label=label)
        axes.bar_label(drawn, fmt="%.2f", padding=4, color=ink())
    axes.set_yticks(range(len(bars)), list(bars))
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("draft tokens accepted per forward")
    grid(axes, "x")
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    return figure


def _validation(validation: Validation) -> Figure:
    figure = Figure(figsize=(8.0, 4.5), layout="constrained")
    axes = figure.subplots()
    for percent, alpha in ((12, 0.15), (5, 0.25)):
        axes.axhspan(-percent, percent, color=COLOURS[4], alpha=alpha, linewidth=0)
    axes.axhline(0.0, color=ink(), linewidth=1.0)
    for number, way in enumerate(dict.fromkeys(row.way for row in validation.rows)):
        own = [row for row in validation.rows if row.way == way]
        rates = [row.measured for row in own]
        errors = [100 * row.error for row in own]
        colour = COLOURS[number]
        axes.scatter(rates, errors, color=colour, marker=MARKERS[number], label=way, zorder=3)
    reach = max(15.0, 115 * validation.worst_error)
    axes.set_ylim(-reach, reach)
    axes.set_xlim(left=0)
    axes.set_xlabel("measured, tokens/s")
    axes.set_ylabel("error of the prediction, %")
    grid(axes)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return figure
