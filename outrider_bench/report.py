"""The output of `outrider lab bench` and of the simulator: tables and JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from outrider_bench.console import table_of
from outrider_bench.experiment.report.figures import groups_of, sample_figures
from outrider_bench.experiment.report.results import Spread
from outrider_bench.experiment.report.tables import (
    ACCEPTANCE,
    LATENCIES,
    NEXT_DRAFTS,
    PHASE_TIMES,
)
from outrider_bench.intervals import MOST_OF_ALLOWED, of_allowed
from outrider_bench.sample import Sample

_RATES = {
    "tokens_per_s": "tokens/s",
    "full_tokens_per_s": "tokens/s while the batch is full, without the end of a run, when few "
    "requests remain",
}
# Plain decoding by the same verifier, of the bench and of the simulator.
_PLAIN = ("outrider, plain", "simulated, plain")
_DISTURBED = "!: disturbed, since the speed exceeds what the tokens per forward allow"
_STEPS = {
    **PHASE_TIMES,
    "tokens_per_forward": "tokens / step",
    "of_limit": "of limit",
    "acceptance": "acceptance",
    **NEXT_DRAFTS,
    "wasted_per_token": "wasted / token",
    "draft_bytes_per_token": "bytes / token",
}
_STEPS_NOTE = (
    "the verifier's steps: milliseconds by phase; tokens that a sequence's step commits; the limit "
    "is the time of forwards alone on an idle machine; then what commits found of the next draft"
)

_ACCEPTANCE_NOTE = "acceptance, and the share of drafts whose token at a position was accepted,"


@dataclass(slots=True)
class Results:
    """Samples of one pair of models, one a round, by batch size and way."""

    pair: str
    samples: dict[int, dict[str, list[Sample]]] = field(default_factory=dict)

    def add(self, batch: int, way: str, sample: Sample) -> None:
        """Append one round's sample of a way at a batch size."""
        self.samples.setdefault(batch, {}).setdefault(way, []).append(sample)

    @property
    def ways(self) -> list[str]:
        """The ways that were measured at any batch size, in the order of their first samples."""
        return list(dict.fromkeys(way for ways in self.samples.values() for way in ways))

    def as_json(self) -> list[dict[str, Any]]:
        """All samples, one object for each batch size and way. Times are in seconds."""
        return [
            {"batch": batch, "way": way, "samples": [asdict(sample) for sample in samples]}
            for batch, ways in self.samples.items()
            for way, samples in ways.items()
        ]


def tables(results: Results, base: str) -> Iterator[Table]:
    """Yield tables of rates, also over those of the way `base`, of latencies and of steps."""
    title = results.pair
    for rate, words in _RATES.items():
        yield _rates(f"{title}\n{words}", results, base, rate)
    yield _figures(f"{title}\nlatency, in tokens, not chunks", results, LATENCIES)
    yield _figures(f"{title}\n{_STEPS_NOTE}", results, _STEPS)
    samples = [each for ways in results.samples.values() for own in ways.values() for each in own]
    groups = groups_of(name for sample in samples for name in sample_figures(sample))
    for group in ("", *groups):
        of = f"of {group.replace('_', ' ', 1)}" if group else "of all"
        names = {f"{group}_{name}".lstrip("_"): words for name, words in ACCEPTANCE.items()}
        yield _figures(f"{title}\n{_ACCEPTANCE_NOTE} {of}", results, names)


def _rates(title: str, results: Results, base: str, rate: str) -> Table:
    def rates(batch: int, way: str) -> list[float | None]:
        return [getattr(sample, rate) for sample in results.samples[batch].get(way, [])]

    batches = list(results.samples)
    title += f"; median of the rounds (95 % interval), and × {base} of the same round"
    columns = [name for batch in batches for name in (f"batch {batch}", "×")]
    table = table_of(title, ("way", *columns))
    table.caption = _DISTURBED
    for way in results.ways:
        row = []
        for batch in batches:
            own = rates(batch, way)
            known = [value for value in own if value is not None]
            # The machine is faster in some rounds than in others.
            ratios = [a / b for a, b in zip(own, rates(batch, base), strict=False) if a and b]
            row.append(Spread.of(known).words(1) if known else "–")
            mark = " !" if is_disturbed(results.samples[batch], way) else ""
            row.append(f"{Spread.of(ratios).words()}{mark}" if ratios else "–")
        table.add_row(way, *row)
    return table


def _figures(title: str, results: Results, figures: Mapping[str, str]) -> Table:
    """A table of the rounds' medians."""
    table = table_of(title, ("way", "batch", *figures.values()))
    for way in results.ways:
        for batch, ways in results.samples.items():
            found = [sample_figures(sample) for sample in ways.get(way, [])]
            values = [[each[name] for each in found if name in each] for name in figures]
            if any(values):
                shown = [f"{median(each):.2f}" if each else "–" for each in values]
                table.add_row(way, str(batch), *shown)
    return table


def is_disturbed(samples: Mapping[str, Sequence[Sample]], way: str) -> bool:
    """Whether a way's speed over plain decoding exceeds what its tokens per forward allow.

    `samples` are those of one batch size, one a round. False where plain decoding was not measured
    or the verifier's counters are not known.
    """
    plain = next((samples[name] for name in _PLAIN if name in samples), ())
    shares = []
    for ours, its in zip(samples.get(way, ()), plain, strict=False):
        tokens, plain_tokens = (
            sample_figures(each).get("tokens_per_forward", 0.0) for each in (ours, its)
        )
        if tokens and plain_tokens:
            ratio = ours.tokens_per_s / its.tokens_per_s
            shares.append(of_allowed(ratio, tokens, plain_tokens))
    return bool(shares) and median(shares) > MOST_OF_ALLOWED


def write(directory: Path, stem: str, record: dict[str, Any]) -> Path:
    """Write a record as JSON, and return the file."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{stem}.json"
    path.write_text(json.dumps(record, indent=1))
    return path
