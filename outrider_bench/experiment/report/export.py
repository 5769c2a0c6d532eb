"""A run's figures as files: CSV, Parquet and JSON. Knows no tables and no pictures."""

from __future__ import annotations

import csv
import io
from dataclasses import asdict
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from outrider_bench.experiment.report.answers import equal_texts
from outrider_bench.experiment.report.compare import Validation
from outrider_bench.experiment.report.labels import words
from outrider_bench.experiment.report.results import ALL, Results
from outrider_bench.experiment.report.sweeps import break_evens

_KEYS = ("cell", "source", "way", "repetition", "verifier")


def figure_rows(results: Results) -> list[dict[str, Any]]:
    """One dictionary a cell, source, way, repetition and verifier, all with the same keys.

    Values of the sweep have the keys `sweep.<path>`. A missing figure is None.
    """
    cells = {cell.key: cell for cell in results.cells}
    names = sorted({name for row in results.rows for name in row.figures})
    rows = []
    for row in results.rows:
        cell = cells[row.cell]
        swept = {f"sweep.{path}": _plain(path, value) for path, value in cell.point.items()}
        keys = {name: getattr(row, name) for name in _KEYS}
        figures = {name: row.figures.get(name) for name in names}
        rows.append({**keys, "is_baseline": cell.is_baseline, **swept, **figures})
    return rows


def as_csv(rows: list[dict[str, Any]]) -> str:
    """Tidy CSV with a header; numbers are written in full."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()


def write_parquet(rows: list[dict[str, Any]], path: Path) -> bool:
    """Write the rows as Parquet; returns False, with nothing written, if pyarrow is missing.

    A column of the sweep that holds words and numbers is written as words.
    """
    if find_spec("pyarrow") is None:
        return False
    arrow = import_module("pyarrow")
    parquet = import_module("pyarrow.parquet")
    columns = {name: _of_one_kind([row[name] for row in rows]) for name in rows[0]}
    parquet.write_table(arrow.table(columns), path)
    return True


def as_json(results: Results, answer: list[str], validation: Validation | None) -> dict[str, Any]:
    """The report for programs: the answer, and each cell's figures over the repetitions."""
    checked, differing = equal_texts(results)
    return {
        "experiment": results.experiment.name,
        "question": results.experiment.question,
        "answer": answer,
        "about": {name: value for name, value in results.about.items() if name != "experiment"},
        "cells": [_cell_json(results, key) for key in results.measurements],
        "break_even": [asdict(even) for even in break_evens(results)],
        "texts": {"compared_cells": checked, "differing_cells": differing},
        "validation": _validation_json(validation),
    }


def _cell_json(results: Results, key: tuple[str, Any]) -> dict[str, Any]:
    cell = next(cell for cell in results.cells if cell.key == key[0])
    rows = [row for row in results.rows if (row.cell, row.source, row.verifier) == (*key, ALL)]
    ways: dict[str, dict[str, Any]] = {}
    for row in rows:
        for figure in row.figures:
            spread = results.spread(cell, key[1], row.way, figure)
            if spread is not None:
                ways.setdefault(row.way, {})[figure] = asdict(spread)
    head = {"cell": key[0], "source": key[1], "point": cell.point, "is_baseline": cell.is_baseline}
    return {**head, "ways": ways}


def _validation_json(validation: Validation | None) -> dict[str, Any] | None:
    if validation is None:
        return None
    rows = [{**asdict(row), "error": row.error} for row in validation.rows]
    return {**asdict(validation), "rows": rows}


def _plain(path: str, value: Any) -> Any:
    """A value of a sweep, with lists as words."""
    if isinstance(value, str | int | float | bool):
        return value
    return words(path, value)


def _of_one_kind(values: list[Any]) -> list[Any]:
    kinds = {type(value) for value in values if value is not None}
    if len(kinds) < 2:
        return values
    convert: type[float] | type[str] = str
    if kinds <= {int, float, bool}:
        convert = float
    return [None if value is None else convert(value) for value in values]
