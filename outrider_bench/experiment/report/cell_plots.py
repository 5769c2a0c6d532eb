"""Plots by cell: speed with its range, the heat map of drafter × placement, and a step's split."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure

from outrider_bench.experiment.records import DRAFTED, PLAIN
from outrider_bench.experiment.report.answers import Rated, rated_cells
from outrider_bench.experiment.report.contents import PHASE_TITLES
from outrider_bench.experiment.report.drawing import (
    COLOURS,
    PHASE_COLOURS,
    Picture,
    beside_bar,
    grid,
    ink,
    picture,
    with_source,
)
from outrider_bench.experiment.report.figures import PHASES, WAITS
from outrider_bench.experiment.report.labels import placement, point_words
from outrider_bench.experiment.report.results import Results, Source
from outrider_bench.experiment.spec import Cell

_MOST_BARS = 40

Split = list[tuple[str, float]]
"""Milliseconds of a step by phase."""


def speed_bars(results: Results) -> Iterator[Picture]:
    """× plain by cell with its range, for sweeps without a numeric axis."""
    rated = rated_cells(results)[:_MOST_BARS]
    if len(rated) > 1:
        caption = (
            "Speed of drafted decoding over plain decoding by cell: median of the repetitions, "
            "with bars for their range; right of 1.0 drafting gains."
        )
        yield picture("cells", "Speed by cell", caption, lambda: _bars(rated))


def heat_maps(results: Results) -> Iterator[Picture]:
    """× plain by drafter and placement, where at least two of both were swept."""
    rated = rated_cells(results)
    labels = [(one, *_heat_place(results, one.cell)) for one in rated]
    rows = list(dict.fromkeys(row for _, row, _ in labels))
    columns = list(dict.fromkeys(column for _, _, column in labels))
    unique = len({(row, column) for _, row, column in labels}) == len(labels)
    if unique and len(rows) > 1 and len(columns) > 1:
        values = {(row, column): one for one, row, column in labels}
        caption = (
            "Speed of drafted decoding over plain decoding by drafter and placement: blue is "
            "faster than plain decoding, red is slower."
        )
        yield picture(
            "heat-map", "Drafter × placement", caption, lambda: _heat_map(rows, columns, values)
        )


def split_pictures(results: Results) -> Iterator[Picture]:
    """A step's milliseconds by phase, a bar for each drafted cell, below plain decoding."""
    bars = list(_splits(results))
    shown = bars[:_MOST_BARS]
    if shown:
        caption = (
            "Mean time of an engine step by phase: the target's forward, the wait for a draft, and "
            "the host's work."
        )
        if len(bars) > len(shown):
            caption += f" The first {len(shown)} of {len(bars)} bars; the table has all."
        yield picture("step", "Where the time of a step went", caption, lambda: _split(shown))


def _bars(rated: list[Rated]) -> Figure:
    figure = Figure(figsize=(8.0, 1.4 + 0.36 * len(rated)), layout="constrained")
    axes = figure.subplots()
    for place, one in enumerate(rated):
        spread = one.times_plain
        colour = COLOURS[1]
        if spread.median >= 1.0:
            colour = COLOURS[0]
        hatch = "//" if one.source == "predicted" else None
        axes.barh(place, spread.median, color=colour, alpha=0.85, hatch=hatch, height=0.65)
        axes.plot([spread.least, spread.most], [place, place], color=ink(), linewidth=1.5)
        beside_bar(axes, f"{spread.median:.2f}", spread.most, place)
    axes.axvline(1.0, color=ink(), linewidth=1.0, alpha=0.7)
    axes.set_yticks(range(len(rated)), [one.label for one in rated])
    axes.set_ylim(len(rated) - 0.4, -0.6)
    axes.set_xlim(0, 1.12 * max(1.0, *(one.times_plain.most for one in rated)))
    axes.set_xlabel("tokens/s, × plain decoding")
    grid(axes, "x")
    return figure


def _heat_place(results: Results, cell: Cell) -> tuple[str, str]:
    """Row and column of a cell: its drafter, and the drafter's place or the rest of the sweep."""
    experiment = results.experiment
    if list(experiment.sweep) == ["use"]:
        families = [cell.experiment.drafters[name].family for name in cell.experiment.use]
        return " + ".join(dict.fromkeys(families)) or "none", placement(cell.experiment)
    first = "use" if "use" in experiment.sweep else next(iter(experiment.sweep), "")
    row = {path: value for path, value in cell.point.items() if path == first}
    return point_words(row), point_words(cell.point, without=[first])


def _heat_map(rows: list[str], columns: list[str], values: dict[tuple[str, str], Rated]) -> Figure:
    size = (2.2 + 0.95 * len(columns), 2.2 + 0.55 * len(rows))
    figure = Figure(figsize=(max(size[0], 5.0), size[1]), layout="constrained")
    axes = figure.subplots()
    reach = max(0.1, *(abs(one.times_plain.median - 1.0) for one in values.values()))
    norm = TwoSlopeNorm(1.0, 1.0 - reach, 1.0 + reach)
    nothing = float("nan")
    speed_of = {place: one.times_plain.median for place, one in values.items()}
    grid_of = [[speed_of.get((row, column), nothing) for column in columns] for row in rows]
    image = axes.imshow(grid_of, cmap="RdBu", norm=norm, aspect="auto")
    _write_values(axes, rows, columns, values, reach)
    slanted: dict[str, Any] = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"}
    long = max(map(len, columns)) > 10
    axes.set_xticks(range(len(columns)), columns, **(slanted if long else {}))
    axes.set_yticks(range(len(rows)), rows)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    figure.colorbar(image, ax=axes, label="tokens/s, × plain decoding", shrink=0.9)
    return figure


def _write_values(
    axes: Axes,
    rows: list[str],
    columns: list[str],
    values: dict[tuple[str, str], Rated],
    reach: float,
) -> None:
    for row, column in ((row, column) for row in rows for column in columns):
        place = (columns.index(column), rows.index(row))
        one = values.get((row, column))
        if one is None:
            axes.text(*place, "not run", ha="center", va="center", color=ink(), alpha=0.6)
            continue
        speed = one.times_plain.median
        colour = "black"
        if abs(speed - 1.0) > 0.6 * reach:
            colour = "white"
        text = f"{speed:.2f}"
        if one.source == "predicted":
            text += "\npredicted"
        axes.text(*place, text, ha="center", va="center", color=colour)


def _splits(results: Results) -> Iterator[tuple[str, Source, Split]]:
    """Bars with their labels; plain decoding is the first one, once, since all cells share it."""
    plain = [(source, _phases(results, cell, source, PLAIN)) for cell, source in results.found()]
    yield from [("plain decoding", source, split) for source, split in plain if split][:1]
    for cell, source in results.found():
        split = _phases(results, cell, source, DRAFTED)
        if split:
            yield point_words(cell.point), source, split


def _phases(results: Results, cell: Cell, source: Source, way: str) -> Split:
    found = []
    divided = results.spread(cell, source, way, "step_wait_network_ms") is not None
    waits: tuple[str, ...] = PHASES[1:2]
    if divided:
        waits = WAITS
    for phase in (PHASES[0], *waits, *PHASES[2:]):
        spread = results.spread(cell, source, way, f"step_{phase}_ms")
        if spread is not None and spread.median > 0.0:
            found.append((phase, spread.median))
    return found


def _split(bars: list[tuple[str, Source, Split]]) -> Figure:
    figure = Figure(figsize=(8.5, 1.7 + 0.36 * len(bars)), layout="constrained")
    axes = figure.subplots()
    seen: set[str] = set()
    for place, (_, source, split) in enumerate(bars):
        left = 0.0
        for phase, milliseconds in split:
            label = PHASE_TITLES[phase] if phase not in seen else None
            seen.add(phase)
            colour = PHASE_COLOURS[phase]
            alpha = 1.0
            if source == "predicted":
                alpha = 0.55
            axes.barh(place, milliseconds, left=left, color=colour, label=label, alpha=alpha)
            left += milliseconds
        beside_bar(axes, f"{left:.1f}", left, place)
    labels = [with_source(label, source) for label, source, _ in bars]
    axes.set_yticks(range(len(bars)), labels)
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.set_xlim(0, 1.08 * max(sum(ms for _, ms in split) for _, _, split in bars))
    axes.set_xlabel("milliseconds of a step, mean")
    grid(axes, "x")
    by_label = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    order = [title for title in PHASE_TITLES.values() if title in by_label]
    handles = [by_label[title] for title in order]
    figure.legend(handles, order, loc="outside lower center", ncols=4, frameon=False)
    return figure
