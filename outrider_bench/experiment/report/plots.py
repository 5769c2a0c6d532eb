"""Draws a report's plot: the speed of each cell, or the speed over a swept number."""

from __future__ import annotations

import io

from matplotlib.figure import Figure

from outrider_bench.experiment.report.answers import axis_of, lines_of, rated_cells
from outrider_bench.experiment.report.results import Results


def speed_plot(results: Results) -> bytes | None:
    """Return a PNG of the speeds in × plain decoding; None if no cell has a speed."""
    path = axis_of(results)
    figure = _bars(results) if path is None else _lines(results, path)
    if figure is None:
        return None
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=144, format="png")
    return buffer.getvalue()


def _lines(results: Results, path: str) -> Figure | None:
    """Plot × plain along a swept number, with the median's interval; predictions are dashed."""
    lines = lines_of(results, path)
    if not lines:
        return None
    figure = Figure(figsize=(8.0, 5.0), layout="constrained")
    axes = figure.subplots()
    names = list(dict.fromkeys(name for name, _, _ in lines))
    for name, source, points in lines:
        ranges = [
            [spread.median - spread.low for _, spread in points],
            [spread.high - spread.median for _, spread in points],
        ]
        axes.errorbar(
            [x for x, _ in points],
            [spread.median for _, spread in points],
            yerr=ranges,
            label=f"{name}, predicted" if source == "predicted" else name,
            linestyle="--" if source == "predicted" else "-",
            color=f"C{names.index(name)}",
            marker="o",
            capsize=3,
        )
    axes.axhline(1.0, color="grey")
    ticks = sorted({x for _, _, points in lines for x, _ in points})
    least = next((x for x in ticks if x > 0), 1.0)
    axes.set_xscale("symlog", linthresh=least)
    axes.set_xlim(left=-0.2 * least if 0 in ticks else 0.9 * least)
    axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
    axes.set_xlabel(path)
    axes.set_ylabel("tokens/s, × plain decoding")
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def _bars(results: Results) -> Figure | None:
    """Plot each cell's × plain with the median's interval, for sweeps without a numeric axis."""
    rated = rated_cells(results)
    if not rated:
        return None
    figure = Figure(figsize=(8.0, 1.6 + 0.36 * len(rated)), layout="constrained")
    axes = figure.subplots()
    axes.set_yticks(range(len(rated)), [label for label, _ in rated])
    axes.invert_yaxis()
    for place, (_, spread) in enumerate(rated):
        axes.barh(place, spread.median, color="C0" if spread.median >= 1.0 else "C1")
        axes.plot([spread.low, spread.high], [place, place], color="black")
    axes.axvline(1.0, color="grey")
    axes.set_xlabel("tokens/s, × plain decoding")
    return figure
