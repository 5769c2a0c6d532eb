"""`outrider experiment report`: tables, plots, a page and files of a run's figures."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from outrider.process.usage import invoke, refuse
from outrider_bench.console import console_for_output
from outrider_bench.experiment.records import Folder
from outrider_bench.experiment.report import contents, page
from outrider_bench.experiment.report.answers import answers
from outrider_bench.experiment.report.compare import Validation, compare
from outrider_bench.experiment.report.export import as_csv, as_json, figure_rows, write_parquet
from outrider_bench.experiment.report.reading import read
from outrider_bench.experiment.report.results import Results
from outrider_bench.experiment.report.tables import rich_table
from outrider_bench.experiment.spec import load

_PROGRAM = "outrider experiment report"
_RUNS = Path("bench/out/experiments")


def main(arguments: list[str]) -> int:
    """Make the report of a run; returns the exit status."""
    status: int = invoke(_command, _PROGRAM, arguments)
    return status


def validation(folder: Folder) -> Validation:
    """Predicted beside measured tokens/s of a run.

    Raises ValueError if no cell of the folder has both.
    """
    compared = compare(read(folder))
    if compared is None:
        raise ValueError(f"{folder.path}: no cell has both a measurement and a prediction")
    return compared


def validation_table(compared: Validation) -> RichTable:
    """Predicted beside measured tokens/s by cell and way, with the error in percent."""
    table = RichTable(title="Predicted and measured, tokens/s", title_justify="left")
    middle = 100 * compared.median_error
    worst = 100 * compared.worst_error
    table.caption = f"Error in the median {middle:.1f} %, worst {worst:.1f} %"
    for head in ("cell", "way"):
        table.add_column(head)
    for head in ("measured", "predicted", "error, %"):
        table.add_column(head, justify="right")
    for row in compared.rows:
        numbers = (f"{row.measured:.1f}", f"{row.predicted:.1f}", f"{100 * row.error:+.1f}")
        table.add_row(escape(row.label), row.way, *numbers)
    return table


def write(results: Results, out: Path, console: Console) -> list[Path]:
    """Write all files of a report, print its answer and tables, and return the files."""
    # matplotlib takes a second to load, and `validation` does not need it.
    from outrider_bench.experiment.report.plots import pictures

    out.mkdir(parents=True, exist_ok=True)
    compared = compare(results)
    answer = answers(results, compared)
    tables = list(contents.tables(results))
    _show(results, answer, console)
    for table in tables:
        console.print(rich_table(table))
    if compared is not None:
        console.print(validation_table(compared))
    rows = figure_rows(results)
    figures_csv = as_csv(rows)
    drawn = pictures(results, compared)
    written = {
        "figures.csv": figures_csv.encode(),
        "report.json": json.dumps(as_json(results, answer, compared), indent=1).encode(),
        **{f"{picture.name}.png": picture.light for picture in drawn},
    }
    for name, data in written.items():
        (out / name).write_bytes(data)
    names = list(written)
    if write_parquet(rows, out / "figures.parquet"):
        names.insert(1, "figures.parquet")
    else:
        console.print("figures.parquet is not written, since pyarrow is not installed.")
    files = [*names, *_raw_files(results, out)]
    html = page.render(results, answer, tables, drawn, figures_csv, files)
    (out / "index.html").write_text(html)
    return [out / name for name in ["index.html", *names]]


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
    console = console_for_output()
    try:
        folder = Folder(source) if source.is_dir() else latest_run(source, runs)
        results = read(folder)
    except ValueError as error:
        refuse(_PROGRAM, str(error))
    for path in write(results, out or folder.path / "report", console):
        print(f"written: {path}")
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
    folder = max(found)[2]
    if len(found) > 1:
        print(f"{len(found)} runs of {experiment.name} are there; this is the latest, {folder}")
    return Folder(folder)


def _show(results: Results, answer: Sequence[str], console: Console) -> None:
    console.print(f"[bold]{escape(results.experiment.question or results.experiment.name)}[/bold]")
    for sentence in answer:
        console.print(f"- {escape(sentence)}", highlight=False)
    for name, text in page.facts(results):
        console.print(f"{name}: {escape(text)}", highlight=False)


def _raw_files(results: Results, out: Path) -> list[str]:
    """The run's own files, relative to the report."""
    folder = results.folder
    files = [folder / "run.json", *sorted(folder.glob("cells/*/*.json"))]
    files += sorted(folder.glob("predicted/*/*.json"))
    return [os.path.relpath(file, out) for file in files]
