"""Prints a run's answer and tables, and writes its plot and a CSV of its figures."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column
from rich.table import Table as RichTable
from rich.text import Text

from outrider_bench.experiment.report.answers import answers
from outrider_bench.experiment.report.results import Results, words
from outrider_bench.experiment.report.tables import Table, tables

_KEYS = ("cell", "source", "way", "repetition")


def write(results: Results, console: Console) -> None:
    """Print the answer and the tables, and write figures.csv and the plot."""
    out = results.folder / "report"
    out.mkdir(exist_ok=True)
    console.print(Text(results.experiment.question or results.experiment.name, style="bold"))
    for sentence in answers(results):
        console.print(Text(f"- {sentence}"))
    for table in tables(results):
        console.print(_rich(table))
    rows = figure_rows(results)
    with (out / "figures.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    write_plot(results, out / "speed.png", console)
    console.print(Text(f"written: {out}"))


def write_plot(results: Results, path: Path, console: Console) -> None:
    """Write the plot as PNG, unless there is nothing to plot, or matplotlib is missing."""
    try:
        # Only the extra `bench` installs matplotlib.
        from outrider_bench.experiment.report.plots import speed_plot
    except ModuleNotFoundError as missing:
        if missing.name != "matplotlib":
            raise
        console.print("no plot: matplotlib is missing (.venv/bin/pip install matplotlib)")
        return
    plot = speed_plot(results)
    if plot is not None:
        path.write_bytes(plot)


def figure_rows(results: Results) -> list[dict[str, Any]]:
    """Return a dictionary for each cell, source, decoding mode and repetition.

    All dictionaries have the same keys. Values of the sweep have the keys `sweep.<path>`. A missing
    figure is None.
    """
    cells = {cell.key: cell for cell in results.cells}
    names = sorted({name for row in results.rows for name in row.figures})
    rows = []
    for row in results.rows:
        swept = {f"sweep.{path}": words(v) for path, v in cells[row.cell].point.items()}
        keys = {name: getattr(row, name) for name in _KEYS}
        rows.append({**keys, **swept, **{name: row.figures.get(name) for name in names}})
    return rows


def _rich(table: Table) -> RichTable:
    columns = [Column(name, overflow="fold") for name in table.columns]
    shown = RichTable(*columns, title=table.title, caption=table.note, title_justify="left")
    for line in table.lines:
        shown.add_row(*map(Text, line))
    return shown
