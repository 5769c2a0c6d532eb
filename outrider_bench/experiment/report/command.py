"""`outrider experiment report`: tables, plots, a page and files of a run's figures."""

from __future__ import annotations

import csv
import html
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Any

import click
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from outrider.process.usage import invoke, refuse
from outrider_bench.console import console_for_output
from outrider_bench.experiment.records import Folder
from outrider_bench.experiment.report.answers import answers
from outrider_bench.experiment.report.labels import words
from outrider_bench.experiment.report.results import Results, read
from outrider_bench.experiment.report.tables import Table, tables
from outrider_bench.experiment.spec import load

_PROGRAM = "outrider experiment report"
_RUNS = Path("bench/out/experiments")
_KEYS = ("cell", "source", "way", "repetition", "verifier")
_PAGE = Template(
    """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>$name</title>
<style>
body { font-family: sans-serif; margin: 2rem auto; max-width: 76rem; }
img { max-width: 100%; }
table { border-collapse: collapse; }
th, td { border-bottom: 1px solid #ccc; padding: .3rem .7rem; text-align: right; }
</style>
</head>
<body>
<h1>$question</h1>
<ul>$answer</ul>
<p>$about</p>
$plots
$tables
</body>
</html>
"""
)


def main(arguments: list[str]) -> int:
    """Make the report of a run; returns the exit status."""
    status: int = invoke(_command, _PROGRAM, arguments)
    return status


@click.command(_PROGRAM)
@click.argument("source", metavar="FOLDER|FILE.yaml", type=click.Path(exists=True, path_type=Path))
@click.option(
    "--runs",
    type=click.Path(path_type=Path),
    default=_RUNS,
    help=f"Directory that holds the runs of FILE.yaml; {_RUNS} unless given.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Directory that the report is written to; `report` in the run's folder unless given.",
)
def _command(source: Path, runs: Path, out: Path | None) -> int:
    """Make tables, plots and a page of a run's measurements and predictions.

    Takes a run's folder, or an experiment's file, whose latest run it reports.
    """
    try:
        folder = Folder(source) if source.is_dir() else latest_run(source, runs)
        results = read(folder)
    except ValueError as error:
        refuse(_PROGRAM, str(error))
    write(results, out or folder.path / "report", console_for_output())
    return 0


def latest_run(file: Path, runs: Path) -> Folder:
    """The run of this very experiment that began last; runs are never put together.

    Raises ValueError if there is none.
    """
    experiment = load(file)
    wanted = experiment.model_dump(mode="json")
    found = []
    for candidate in (runs / experiment.name).glob("*/run.json"):
        about = Folder(candidate.parent).about()
        if about.get("experiment") == wanted:
            found.append((str(about.get("began", "")), candidate.stat().st_mtime, candidate.parent))
    if not found:
        raise ValueError(f"{file}: {runs / experiment.name} has no run of this experiment")
    return Folder(max(found)[2])


def write(results: Results, out: Path, console: Console) -> None:
    """Print the answer and the tables, and write all files of a report."""
    # `--help` needs no matplotlib, which only the extra `bench` installs.
    from outrider_bench.experiment.report.plots import plots

    out.mkdir(parents=True, exist_ok=True)
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
    if find_spec("pyarrow") is not None:
        figures = import_module("pyarrow.csv").read_csv(out / "figures.csv")
        import_module("pyarrow.parquet").write_table(figures, out / "figures.parquet")
    drawn = plots(results)
    for name, data in drawn.items():
        (out / f"{name}.png").write_bytes(data)
    (out / "index.html").write_text(_page(results, answer, made, list(drawn)))
    console.print(Text(f"written: {out}"))


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
    shown = RichTable(title=table.title, caption=table.note, title_justify="left")
    for column in table.columns:
        shown.add_column(column, overflow="fold")
    for line in table.lines:
        shown.add_row(*map(Text, line))
    return shown


def _page(results: Results, answer: list[str], made: list[Table], drawn: list[str]) -> str:
    """The report as a plain page beside its pictures."""
    about = results.about
    machine = about.get("machine") or {}
    shown = [f"{name}: {about.get(name)}" for name in ("commit", "began", "command")]
    shown.append(f"machine: {machine.get('processor')}, {len(machine.get('cores', ()))} cores")
    return _PAGE.substitute(
        name=html.escape(results.experiment.name),
        question=html.escape(results.experiment.question or results.experiment.name),
        answer="".join(f"<li>{html.escape(sentence)}</li>\n" for sentence in answer),
        about=html.escape("; ".join(shown)),
        plots="".join(f'<p><img src="{name}.png" alt="{name}"></p>\n' for name in drawn),
        tables="".join(map(_html, made)),
    )


def _html(table: Table) -> str:
    def line(tag: str, cells: list[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>\n"

    rows = line("th", table.columns) + "".join(line("td", cells) for cells in table.lines)
    note = html.escape(table.note)
    return f"<h2>{html.escape(table.title)}</h2>\n<p>{note}</p>\n<table>\n{rows}</table>\n"
