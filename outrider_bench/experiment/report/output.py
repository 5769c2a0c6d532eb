"""Tables, a plot, a page and files of a run's figures."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from jinja2 import Environment
from rich.console import Console
from rich.table import Column
from rich.table import Table as RichTable
from rich.text import Text

from outrider_bench.experiment.report.answers import answers
from outrider_bench.experiment.report.results import Results, words
from outrider_bench.experiment.report.tables import Table, tables

_KEYS = ("cell", "source", "way", "repetition", "verifier")
_PAGE = Environment(autoescape=True).from_string(
    """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{{ run.name }}</title>
<style>
body { font-family: sans-serif; margin: 2rem auto; max-width: 76rem; }
img { max-width: 100%; }
table { border-collapse: collapse; }
th, td { border-bottom: 1px solid #ccc; padding: .3rem .7rem; text-align: right; }
</style>
</head>
<body>
<h1>{{ run.question or run.name }}</h1>
<ul>{% for sentence in answer %}<li>{{ sentence }}</li>{% endfor %}</ul>
<p>{{ about }}</p>
{% if has_plot %}<p><img src="speed.png" alt="speed over plain decoding"></p>{% endif %}
{% for table in tables %}
<h2>{{ table.title }}</h2>
<p>{{ table.note }}</p>
<table>
<tr>{% for column in table.columns %}<th>{{ column }}</th>{% endfor %}</tr>
{% for line in table.lines %}
<tr>{% for cell in line %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</table>
{% endfor %}
</body>
</html>
"""
)


def write(results: Results, console: Console) -> None:
    """Print the answer and the tables, and write all files of a report."""
    out = results.folder / "report"
    out.mkdir(exist_ok=True)
    answer = answers(results)
    made = list(tables(results))
    console.print(Text(results.experiment.question or results.experiment.name, style="bold"))
    for sentence in answer:
        console.print(Text(f"- {sentence}"))
    for table in made:
        console.print(_rich(table))
    rows = figure_rows(results)
    with (out / "figures.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    has_plot = write_plot(results, out / "speed.png", console)
    machine = results.about.get("machine") or {}
    about = [f"{name}: {results.about.get(name)}" for name in ("commit", "began", "command")]
    about.append(f"machine: {machine.get('processor')}, {len(machine.get('cores', ()))} cores")
    page = _PAGE.render(
        run=results.experiment,
        answer=answer,
        about="; ".join(about),
        has_plot=has_plot,
        tables=made,
    )
    (out / "index.html").write_text(page)
    console.print(Text(f"written: {out}"))


def write_plot(results: Results, path: Path, console: Console) -> bool:
    """Write the plot as PNG; False where there is nothing to plot, or nothing to plot it with."""
    try:
        # Only the extra `bench` installs matplotlib.
        from outrider_bench.experiment.report.plots import speed_plot
    except ModuleNotFoundError as missing:
        if missing.name != "matplotlib":
            raise
        console.print("no plot: matplotlib is missing (.venv/bin/pip install matplotlib)")
        return False
    plot = speed_plot(results)
    if plot is not None:
        path.write_bytes(plot)
    return plot is not None


def figure_rows(results: Results) -> list[dict[str, Any]]:
    """One dictionary a cell, source, way, repetition and verifier, all with the same keys.

    Values of the sweep have the keys `sweep.<path>`. A missing figure is None.
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
