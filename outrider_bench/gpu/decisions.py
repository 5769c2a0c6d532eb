"""Compares each figure of `bench/gpu.sh stack` with its prediction, and gives recommendations."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

_Row = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Bar:
    """The least speed of a drafter over plain decoding, and advice if the drafter is slower."""

    use: str
    batch: int
    predicted: float
    """The predicted × plain for bench/experiments/h200.yaml. For n-grams, the results of 2026-11-30
    have it."""
    least: float
    """If the measured × plain is at least this, everything goes on as planned."""
    missed: str


_BARS = (
    _Bar("head", 1, 2.15, 2.0, "waits above 4 ms a step mean that the head runs without graphs"),
    _Bar("head", 8, 1.88, 1.4, "look at the head's kernels: gaps between them are launches"),
    _Bar("inside", 1, 1.38, 1.3, "waits above 2.2 ms a drafted token: the host; else the guesses"),
    _Bar("inside", 8, 1.15, 1.04, "as for one sequence"),
    _Bar("inside", 32, 1.11, 0.98, "the planner should have paused the drafter"),
    _Bar("ngram", 32, 1.11, 1.0, "a step that takes 3 ms more than `accept` waits for the host"),
    _Bar("beside", 1, 1.14, 1.1, "the drafter still works during forwards: look at its place"),
    _Bar("beside", 8, 1.10, 1.0, "as for one sequence"),
)


def decisions(directory: Path) -> str:
    """Return a Markdown table with a row for each figure that a decision depends on.

    `directory` has the `stack*.csv` of one or more runs of `bench/gpu.sh stack`.
    """
    rows = list(_rows(directory))
    plain = {_cell(row): row for row in rows if row["way"] == "plain"}
    drafted = {_cell(row): row for row in rows if row["way"] == "drafted"}
    text = "| drafter | batch | predicted × plain | measured | step | wait | so |\n"
    text += "| --- | ---: | ---: | ---: | ---: | ---: | --- |\n"
    for bar in _BARS:
        row = drafted.get((bar.use, bar.batch))
        if row is None or not row["times_plain"]:
            text += (
                f"| {bar.use} | {bar.batch} | {bar.predicted:.2f} | – | – | – | not measured |\n"
            )
            continue
        found = float(row["times_plain"])
        so = "as planned" if found >= bar.least else f"below {bar.least:g}: {bar.missed}"
        step, wait = (_ms(row, name) for name in ("step_ms", "step_wait_ms"))
        text += f"| {bar.use} | {bar.batch} | {bar.predicted:.2f} | {found:.2f} | {step} | {wait}"
        text += f" | {so} |\n"
    for (use, batch), row in sorted(plain.items()):
        text += f"| plain, beside {use} | {batch} | – | {float(row['tokens_per_s']):.0f} tokens/s"
        text += f" | {_ms(row, 'step_ms')} | {_ms(row, 'step_wait_ms')} | – |\n"
    return text


def _rows(directory: Path) -> Iterator[_Row]:
    for path in sorted(directory.glob("stack*.csv")):
        with path.open(newline="") as file:
            yield from csv.DictReader(file)


def _cell(row: _Row) -> tuple[str, int]:
    """Return the drafter, and the number of sequences at once."""
    return row["sweep.use"], int(row["sweep.workload.batch"])


def _ms(row: _Row, name: str) -> str:
    return f"{float(row[name]):.2f} ms" if row.get(name) else "–"
