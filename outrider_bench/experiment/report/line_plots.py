"""Plots over a numeric axis of the sweep: speed by round trip, and break-even round trips."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from outrider_bench.experiment.report.drawing import (
    COLOURS,
    DASHES,
    MARKERS,
    Picture,
    beside_bar,
    distance_axis,
    grid,
    ink,
    panels,
    picture,
    with_source,
)
from outrider_bench.experiment.report.labels import point_words, titles, words
from outrider_bench.experiment.report.results import SOURCES, Results, Source, Spread
from outrider_bench.experiment.report.sweeps import (
    BreakEven,
    Line,
    axis_of,
    axis_title,
    break_evens,
    lines_of,
    points_of,
)


def speed_pictures(results: Results) -> Iterator[Picture]:
    """× plain along the numeric axis: colours and dashes by two swept paths, panels by the rest."""
    path = axis_of(results)
    lines = lines_of(results, path) if path is not None else []
    if path is None or not any(_drawn(results, line) for line in lines):
        return
    caption = (
        f"Speed of drafted decoding over plain decoding by {titles([path])[path]}: median of the "
        "repetitions, with bars for their range; at 1.0 drafting gains nothing."
    )
    if any(row.source == "predicted" for row in results.rows):
        caption += " Hollow marks on thin lines are predicted."
    yield picture(
        "speed", f"Speed by {titles([path])[path]}", caption, lambda: _speed(results, path, lines)
    )


def break_even_pictures(results: Results) -> Iterator[Picture]:
    """The round trip at which each line falls to plain decoding's speed."""
    evens = break_evens(results)
    if evens:
        caption = (
            "Round trip at which drafted decoding falls to the speed of plain decoding, on "
            "straight lines between those of the sweep; up to an arrow it is faster throughout."
        )
        yield picture("break-even", "Break-even round trip", caption, lambda: _break_evens(evens))


class _Style:
    """Colour and dashes of lines by the values of two swept paths; panels by the rest."""

    def __init__(self, lines: list[Line]) -> None:
        paths = list(lines[0].point)
        values = {path: [words(path, line.point[path]) for line in lines] for path in paths}
        self._values = {path: list(dict.fromkeys(own)) for path, own in values.items()}
        varied = [path for path in paths if len(self._values[path]) > 1]
        # Readers look for the drafter first.
        varied.sort(key=lambda path: path != "use")
        self._colour_path, self._dash_path = [*varied[:2], None, None][:2]
        self._panel_paths = varied[2:]

    def panel(self, line: Line) -> str:
        """The title of the line's panel."""
        if not self._panel_paths:
            return ""
        return point_words({path: line.point[path] for path in self._panel_paths})

    def label(self, line: Line) -> str:
        """The line's label within its panel."""
        return point_words(line.point, without=self._panel_paths) if line.point else line.label

    def of(self, line: Line) -> dict[str, Any]:
        """matplotlib's settings for the line."""
        first = self._place(self._colour_path, line)
        second = self._place(self._dash_path, line)
        return {
            "color": COLOURS[first % len(COLOURS)],
            "marker": MARKERS[(second if self._dash_path else first) % len(MARKERS)],
            "linestyle": DASHES[second % len(DASHES)],
        }

    def _place(self, path: str | None, line: Line) -> int:
        if path is None:
            return 0
        return self._values[path].index(words(path, line.point[path]))


def _speed(results: Results, path: str, lines: list[Line]) -> Figure:
    style = _Style(lines)
    names = list(dict.fromkeys(style.panel(line) for line in lines))
    figure, all_axes = panels(len(names), 8.0 if len(names) == 1 else 5.5, 4.5)
    for name, axes in zip(names, all_axes, strict=True):
        own = [line for line in lines if style.panel(line) == name]
        for line in own:
            for source in SOURCES:
                _draw_line(axes, points_of(results, line, source), source, style, line)
        axes.axhline(1.0, color=ink(), linewidth=1.0, alpha=0.6)
        axes.set_title(name, fontsize=10)
        axes.set_xlabel(axis_title(path))
        axes.set_ylabel("tokens/s, × plain decoding")
        axes.label_outer()
        distance_axis(axes, [x for line in own for x, _ in line.cells])
        _zoom(axes)
        grid(axes)
    _legend(figure, all_axes)
    return figure


def _legend(figure: Figure, all_axes: list[Axes]) -> None:
    """One legend for all panels. It has a predicted line only if that was not measured."""
    handles: dict[str, Any] = {}
    for axes in all_axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    measured = {with_source(label, "predicted") for label in handles}
    shown = [label for label in handles if label not in measured]
    columns = 3
    if max(map(len, shown)) > 20:
        columns = 2
    kept = [handles[label] for label in shown]
    figure.legend(kept, shown, loc="outside lower center", ncols=columns, frameon=False)


def _zoom(axes: Axes) -> None:
    """Show the line at 1.0 always, and differences of 5 % well."""
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 0.9), max(high, 1.1))


def _draw_line(
    axes: Axes, points: list[tuple[float, Spread]], source: Source, style: _Style, line: Line
) -> None:
    if not points:
        return
    look = style.of(line)
    places = [x for x, _ in points]
    middle = [spread.median for _, spread in points]
    if source == "predicted":
        label = with_source(style.label(line), source)
        axes.plot(places, middle, **look, label=label, markerfacecolor="none", linewidth=1.0)
        return
    ranges = [
        [spread.median - spread.least for _, spread in points],
        [spread.most - spread.median for _, spread in points],
    ]
    axes.errorbar(
        places,
        middle,
        yerr=ranges,
        **look,
        label=style.label(line),
        linewidth=1.8,
        capsize=3,
        elinewidth=1.0,
    )


def _break_evens(evens: list[BreakEven]) -> Figure:
    figure = Figure(figsize=(8.5, 1.2 + 0.34 * len(evens)), layout="constrained")
    axes = figure.subplots()
    most = max(even.most_ms for even in evens)
    for place, even in enumerate(evens):
        predicted = even.source == "predicted"
        end = even.most_ms if even.faster else 0.0
        at = even.at_ms if even.at_ms is not None else end
        colour = COLOURS[0]
        alpha = 0.4 if predicted else 0.8
        axes.plot([0, at], [place, place], color=colour, linewidth=5, alpha=alpha)
        if even.at_ms is not None:
            face = "none" if predicted else colour
            axes.plot(at, place, "o", color=colour, markerfacecolor=face, markersize=8)
        elif even.faster:
            axes.plot(at, place, ">", color=colour, markersize=9)
        beside_bar(axes, f" {even.short_words()}", at, place)
    labels = [with_source(even.label, even.source) for even in evens]
    axes.set_yticks(range(len(evens)), labels)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.5 * most)
    axes.set_xlabel("break-even round trip, ms")
    grid(axes, "x")
    return figure


def _drawn(results: Results, line: Line) -> bool:
    return any(points_of(results, line, source) for source in SOURCES)
