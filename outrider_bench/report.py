"""The output of `outrider bench` and of the simulator: tables and JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from outrider_bench.console import table_of
from outrider_bench.experiment.report.figures import LOOKUPS, PHASES, sample_figures
from outrider_bench.sample import Sample

_RATES = {
    "tokens_per_s": "tokens/s",
    "full_tokens_per_s": "tokens/s while the batch is full, without the end of a run, when few "
    "requests remain",
}
_LATENCIES = {
    "ttft_p50_ms": "Median TTFT (ms)",
    "ttft_p99_ms": "P99 TTFT (ms)",
    "tpot_p50_ms": "Median TPOT (ms)",
    "tpot_p99_ms": "P99 TPOT (ms)",
}
_STEPS = {
    **{f"step_{phase}_ms": phase for phase in PHASES},
    "tokens_per_forward": "tokens / step",
    "of_limit": "of limit",
    "acceptance": "acceptance",
    **{f"lookup_{result}": result for result in LOOKUPS},
    "wasted_per_token": "wasted / token",
    "draft_bytes_per_token": "bytes / token",
}
_STEPS_NOTE = (
    "the verifier's steps: milliseconds by phase; tokens that a sequence's step commits; the limit "
    "is the time of forwards alone on an idle machine; then what commits found of the next draft"
)


@dataclass(frozen=True, slots=True)
class Cell:
    """One condition of measurements: kind of prompts, temperature and batch size."""

    kind: str
    temperature: float
    batch: int


@dataclass(slots=True)
class Results:
    """Samples of one pair of models, one a round, by cell and way."""

    pair: str
    samples: dict[Cell, dict[str, list[Sample]]] = field(default_factory=dict)

    def add(self, cell: Cell, way: str, sample: Sample) -> None:
        """Append one round's sample of a way in a cell."""
        self.samples.setdefault(cell, {}).setdefault(way, []).append(sample)

    def groups(self) -> Iterator[tuple[str, list[Cell]]]:
        """The cells of each table, with its title."""
        groups: dict[str, list[Cell]] = {}
        for cell in self.samples:
            title = f"{self.pair}; prompts: {cell.kind}; temperature {cell.temperature:g}"
            groups.setdefault(title, []).append(cell)
        yield from groups.items()

    def as_json(self) -> list[dict[str, Any]]:
        """All samples, one object for each cell and way: rates in tokens/s, times in seconds."""
        return [
            {
                "kind": cell.kind,
                "temperature": cell.temperature,
                "batch": cell.batch,
                "way": way,
                "tokens_per_s": [sample.tokens_per_s for sample in samples],
                "full_tokens_per_s": [sample.full_tokens_per_s for sample in samples],
                "ttft_s": [value for sample in samples for value in sample.ttft],
                "tpot_s": [value for sample in samples for value in sample.tpot],
                "counters": [sample.counters for sample in samples],
            }
            for cell, ways in self.samples.items()
            for way, samples in ways.items()
        ]


def tables(results: Results, bases: Sequence[str]) -> Iterator[Table]:
    """Yield tables of rates, and of latencies and the verifier's steps.

    Rates are also shown over those of the first of `bases` that was measured.
    """
    for title, cells in results.groups():
        for rate, words in _RATES.items():
            yield _rates(f"{title}\n{words}", cells, results, bases, rate)
        yield _figures(f"{title}\nlatency, in tokens, not chunks", cells, results, _LATENCIES)
        yield _figures(f"{title}\n{_STEPS_NOTE}", cells, results, _STEPS)


def _ways(cells: list[Cell], results: Results) -> list[str]:
    return list(dict.fromkeys(way for cell in cells for way in results.samples[cell]))


def _rates(
    title: str, cells: list[Cell], results: Results, bases: Sequence[str], rate: str
) -> Table:
    def rates(cell: Cell, way: str) -> list[float | None]:
        return [getattr(sample, rate) for sample in results.samples[cell].get(way, [])]

    measured = [base for base in bases if any(any(rates(cell, base)) for cell in cells)]
    base = next(iter(measured), bases[0])
    table = Table(title=f"{title}; median of the rounds (range), and × {base} of the same round")
    table.add_column("way")
    for cell in cells:
        table.add_column(f"batch {cell.batch}", justify="right")
        table.add_column("×", justify="right")
    for way in _ways(cells, results):
        row = []
        for cell in cells:
            own = rates(cell, way)
            known = [value for value in own if value is not None]
            # The machine is faster in some rounds than in others.
            ratios = [a / b for a, b in zip(own, rates(cell, base), strict=False) if a and b]
            row.append(spread(known, 1) if known else "–")
            row.append(f"{median(ratios):.2f}" if ratios else "–")
        table.add_row(way, *row)
    return table


def _figures(title: str, cells: list[Cell], results: Results, figures: Mapping[str, str]) -> Table:
    """A table of the rounds' medians."""
    table = table_of(title, ("way", "batch", *figures.values()))
    for way in _ways(cells, results):
        for cell in cells:
            found = [sample_figures(sample) for sample in results.samples[cell].get(way, [])]
            values = [[each[name] for each in found if name in each] for name in figures]
            if any(values):
                shown = [f"{median(each):.2f}" if each else "–" for each in values]
                table.add_row(way, str(cell.batch), *shown)
    return table


def spread(values: Sequence[float], digits: int) -> str:
    """The median, with the range."""
    return f"{median(values):.{digits}f} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def write(directory: Path, stem: str, record: dict[str, Any]) -> Path:
    """Write a record as JSON, and return the file."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{stem}.json"
    path.write_text(json.dumps(record, indent=1))
    return path
