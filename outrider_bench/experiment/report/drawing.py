"""The look of the report's pictures: colours, sizes, light and dark. Knows no experiment."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe and Ito, Color Universal Design (2008), without black and yellow, which cannot be seen on
# one of the two backgrounds.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES = ("-", "--", ":", "-.")
# The colours of the phases of a step, paler ones for small phases.
PHASE_COLOURS = {
    "forward": "#0072B2",
    "wait": "#D55E00",
    "wait_compute": "#D55E00",
    "wait_network": "#E69F00",
    "pack": "#56B4E9",
    "accept": "#009E73",
    "commit": "#CC79A7",
    "send": "#999999",
}
_DPI = 144
_SHARED = {"font.size": 10.0, "axes.spines.top": False, "axes.spines.right": False}
_LIGHT = {"figure.facecolor": "#ffffff", "axes.facecolor": "#ffffff"}
_INK = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
_DARK = {
    "figure.facecolor": "#16191d",
    "axes.facecolor": "#16191d",
    "legend.facecolor": "#16191d",
    **dict.fromkeys(_INK, "#d9dde2"),
}


@dataclass(frozen=True, slots=True)
class Picture:
    """A plot as PNG, on light and on dark, with a caption of one sentence."""

    name: str
    title: str
    caption: str
    light: bytes
    dark: bytes


def picture(name: str, title: str, caption: str, draw: Callable[[], Figure]) -> Picture:
    """Draw twice, once for each background."""
    return Picture(name, title, caption, _png(draw, _LIGHT), _png(draw, _DARK))


def ink() -> Any:
    """The colour of text, for lines of the same colour."""
    return mpl.rcParams["text.color"]


def grid(axes: Axes, axis: Any = "y") -> None:
    """Pale lines behind the data."""
    axes.set_axisbelow(True)
    axes.grid(axis=axis, color=ink(), alpha=0.15, linewidth=0.8)


def beside_bar(axes: Axes, text: str, right: float, place: float) -> None:
    """Write a number to the right of a bar."""
    axes.annotate(text, (right, place), (6, 0), textcoords="offset points", va="center")


def with_source(label: str, source: str) -> str:
    """A label with the source of its figure, unless that is measurement."""
    if source != "measured":
        return f"{label}, {source}"
    return label


def distance_axis(axes: Axes, values: Sequence[float]) -> None:
    """A logarithmic x axis that has room for 0, with a tick at each value."""
    ticks = sorted(set(values))
    positive = [value for value in ticks if value > 0]
    if not positive or len(ticks) < 3:
        axes.set_xticks(ticks)
    elif ticks[0] == 0:
        axes.set_xscale("symlog", linthresh=positive[0], linscale=0.6)
        axes.set_xlim(-0.25 * positive[0], 1.15 * positive[-1])
    else:
        axes.set_xscale("log")
    axes.set_xticks(ticks, [f"{value:g}" for value in ticks])
    axes.set_xticks([], minor=True)


def panels(count: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    """Panels of a size in inches, two a row, with a shared y axis."""
    columns = min(count, 2)
    rows = -(-count // columns)
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    grid_of = figure.subplots(rows, columns, squeeze=False, sharey=True)
    flat = [axes for row in grid_of for axes in row]
    for axes in flat[count:]:
        axes.set_visible(False)
    return figure, flat[:count]


def _png(draw: Callable[[], Figure], style: dict[Any, Any]) -> bytes:
    buffer = io.BytesIO()
    shared: dict[Any, Any] = _SHARED
    with mpl.rc_context({**shared, **style}):
        draw().savefig(buffer, dpi=_DPI, format="png")
    return buffer.getvalue()
