"""The output of `outrider bench`: tables and JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from rich.table import Table

from outrider_bench.console import table_of
from outrider_bench.ways import Sample

PHASES = ("wait", "pack", "forward", "accept", "commit", "send")
LOOKUPS = ("chain", "branch", "late", "miss")


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
        for kind, temperature in dict.fromkeys(
            (cell.kind, cell.temperature) for cell in self.samples
        ):
            cells = [
                cell
                for cell in self.samples
                if (cell.kind, cell.temperature) == (kind, temperature)
            ]
            yield f"{self.pair}; prompts: {kind}; temperature {temperature:g}", cells

    def base(self, names: Sequence[str], rate: Callable[[Sample], float | None]) -> str:
        """The first of these ways that has such a rate; the others are compared with it."""
        measured = {
            way
            for ways in self.samples.values()
            for way, samples in ways.items()
            if any(map(rate, samples))
        }
        return next((name for name in names if name in measured), names[0])

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
    """Yield tables of rates, of latencies, and of a step's time by phase.

    Rates are also shown over those of the first of `bases` that has any.
    """
    for title, cells in results.groups():
        yield _rates(f"{title}\ntokens/s", cells, results, bases, _overall)
        full = (
            "tokens/s while the batch is full, without the end of a run, when few requests remain"
        )
        yield _rates(
            f"{title}\n{full}", cells, results, bases, lambda sample: sample.full_tokens_per_s
        )
        yield _latencies(title, cells, results)
        yield _steps(title, cells, results)


def _ways(cells: list[Cell], results: Results) -> list[str]:
    return list(dict.fromkeys(way for cell in cells for way in results.samples[cell]))


def _overall(sample: Sample) -> float:
    return sample.tokens_per_s


def _rates(
    title: str,
    cells: list[Cell],
    results: Results,
    bases: Sequence[str],
    rate: Callable[[Sample], float | None],
) -> Table:
    base = results.base(bases, rate)

    table = Table(title=f"{title}; median of the rounds (range), and × {base} of the same round")
    table.add_column("way")
    for cell in cells:
        table.add_column(f"batch {cell.batch}", justify="right")
        table.add_column("×", justify="right")
    for way in _ways(cells, results):
        row = []
        for cell in cells:
            samples = results.samples[cell]
            rates = [
                value for sample in samples.get(way, []) if (value := rate(sample)) is not None
            ]
            row.append(_or_dash(rates, lambda values: spread(values, 1)))
            ratios = _ratios(samples, way, base, rate)
            row.append(_or_dash(ratios, lambda values: f"{median(values):.2f}"))
        table.add_row(way, *row)
    return table


def _latencies(title: str, cells: list[Cell], results: Results) -> Table:
    labels = ("Median TTFT (ms)", "P99 TTFT (ms)", "Median TPOT (ms)", "P99 TPOT (ms)")
    table = table_of(f"{title}\nlatency, in tokens, not chunks", ("way", "batch", *labels))
    for way in _ways(cells, results):
        for cell in cells:
            samples = results.samples[cell].get(way, [])
            times = [[v for s in samples for v in getattr(s, name)] for name in ("ttft", "tpot")]
            if all(times):
                numbers = [
                    f"{1000 * value:.1f}"
                    for values in times
                    for value in (median(values), p99(values))
                ]
                table.add_row(way, str(cell.batch), *numbers)
    return table


def p99(values: list[float]) -> float:
    """The 99th percentile; of a single value, itself."""
    if len(values) == 1:
        return values[0]
    return quantiles(values, n=100, method="inclusive")[98]


def _steps(title: str, cells: list[Cell], results: Results) -> Table:
    columns = (
        "way",
        "batch",
        *PHASES,
        "tokens / step",
        "limit, tokens/s",
        "of limit",
        "wasted / token",
        *LOOKUPS,
        "bytes / token",
    )
    table = table_of(
        f"{title}\nthe verifier's steps: milliseconds by phase; tokens that a sequence's "
        "step commits; the limit is the time of forwards alone for these tokens, on an idle "
        "machine; then what commits found of the next draft",
        columns,
    )
    for way in _ways(cells, results):
        for cell in cells:
            samples = results.samples[cell].get(way, [])
            if samples and samples[0].counters:
                table.add_row(way, str(cell.batch), *_step_figures(samples))
    return table


def _step_figures(samples: list[Sample]) -> list[str]:
    total: dict[str, float] = {}
    for sample in samples:
        for name, value in sample.counters.items():
            total[name] = total.get(name, 0.0) + value
    steps = max(total["step_seconds_count"], 1)
    tokens = total["generation_tokens"]
    plain_steps = tokens - total.get("spec_decode_num_accepted_tokens", 0.0)
    efficiency = total.get("decode_isolated_forward_seconds", 0.0) / max(
        total.get("decode_seconds", 0.0), 1e-9
    )
    rate = sum(sample.tokens for sample in samples) / sum(sample.seconds for sample in samples)
    lookups = [total.get(f"draft_lookups.{result}", 0.0) for result in LOOKUPS]
    return [
        *(f"{1000 * total[f'step_phase_seconds.{phase}'] / steps:.2f}" for phase in PHASES),
        f"{tokens / max(plain_steps, 1):.2f}",
        _quotient(rate, efficiency, 1),
        f"{efficiency:.2f}",
        f"{total.get('wasted_tokens', 0.0) / tokens:.2f}",
        *(_quotient(count, sum(lookups), 2) for count in lookups),
        f"{total.get('draft_bytes', 0.0) / tokens:.0f}",
    ]


def _quotient(part: float, whole: float, digits: int) -> str:
    if whole == 0.0:
        return "–"
    return f"{part / whole:.{digits}f}"


def _or_dash(values: list[float], show: Callable[[list[float]], str]) -> str:
    if not values:
        return "–"
    return show(values)


def _ratios(
    samples: dict[str, list[Sample]], way: str, base: str, rate: Callable[[Sample], float | None]
) -> list[float]:
    """Return the ratios of `way` to `base` within each round.

    The machine is faster in some rounds than in others. Rounds in which one of both has no rate are
    left out.
    """
    pairs = [
        (rate(ours), rate(its))
        for ours, its in zip(samples.get(way, []), samples.get(base, []), strict=False)
    ]
    return [ours / its for ours, its in pairs if ours is not None and its is not None]


def spread(values: Sequence[float], digits: int) -> str:
    """The median, with the range."""
    return f"{median(values):.{digits}f} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def write(directory: Path, stem: str, record: dict[str, Any]) -> Path:
    """Write a record as JSON, and return the file."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{stem}.json"
    path.write_text(json.dumps(record, indent=1))
    return path
