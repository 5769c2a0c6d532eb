"""A report's plots: speed by cell or by a swept number, and where a step's time went."""

from __future__ import annotations

import io

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from outrider_bench.experiment.records import DRAFTED
from outrider_bench.experiment.report.answers import rated_cells
from outrider_bench.experiment.report.figures import PHASES
from outrider_bench.experiment.report.labels import point_words
from outrider_bench.experiment.report.results import Results
from outrider_bench.experiment.report.sweeps import axis_of, lines_of

_MOST = 40


def plots(results: Results) -> dict[str, bytes]:
    """All plots that the run has figures for, as PNG by name."""
    path = axis_of(results)
    drawn = {
        "speed": _bars(results) if path is None else _lines(results, path),
        "step": _steps(results),
    }
    return {name: _png(figure) for name, figure in drawn.items() if figure is not None}


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=144, format="png")
    return buffer.getvalue()


def _lines(results: Results, path: str) -> Figure | None:
    """× plain along a swept number, with the range of the repetitions; predictions are dashed."""
    lines = lines_of(results, path)
    if not lines:
        return None
    figure = Figure(figsize=(8.0, 5.0), layout="constrained")
    axes = figure.subplots()
    names = list(dict.fromkeys(name for name, _, _ in lines))
    for name, source, points in lines:
        ranges = [
            [spread.median - spread.least for _, spread in points],
            [spread.most - spread.median for _, spread in points],
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
    axes.set_xlim(left=-0.2 * least)
    axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
    axes.set_xlabel(path)
    axes.set_ylabel("tokens/s, × plain decoding")
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def _bars(results: Results) -> Figure | None:
    """× plain by cell with its range, for sweeps without a numeric axis."""
    rated = rated_cells(results)[:_MOST]
    if not rated:
        return None
    figure, axes = _flat_axes([label for label, _ in rated])
    for place, (_, spread) in enumerate(rated):
        axes.barh(place, spread.median, color="C0" if spread.median >= 1.0 else "C1")
        axes.plot([spread.least, spread.most], [place, place], color="black")
    axes.axvline(1.0, color="grey")
    axes.set_xlabel("tokens/s, × plain decoding")
    return figure


def _steps(results: Results) -> Figure | None:
    """A step's milliseconds by phase, a bar for each drafted cell."""
    found = results.found()[:_MOST]
    figure, axes = _flat_axes([point_words(cell.point) for cell, _ in found])
    left = [0.0] * len(found)
    for phase in PHASES:
        spreads = [results.spread(*pair, DRAFTED, f"step_{phase}_ms") for pair in found]
        widths = [spread.median if spread is not None else 0.0 for spread in spreads]
        axes.barh(range(len(found)), widths, left=left, label=phase)
        left = [before + width for before, width in zip(left, widths, strict=True)]
    axes.set_xlabel("milliseconds of a step, mean")
    figure.legend(loc="outside lower center", ncols=6)
    return figure if any(left) else None


def _flat_axes(labels: list[str]) -> tuple[Figure, Axes]:
    """Axes for a horizontal bar for each label, the first on top."""
    figure = Figure(figsize=(8.0, 1.6 + 0.36 * len(labels)), layout="constrained")
    axes: Axes = figure.subplots()
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    return figure, axes
