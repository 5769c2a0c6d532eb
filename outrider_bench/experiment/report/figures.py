"""The figures of one measurement. Pure arithmetic: knows no cells, files or pictures.

A figure whose denominator is 0, or whose counters were not recorded, is absent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median, quantiles

from outrider_bench.experiment.records import Measurement
from outrider_bench.experiment.report.timeline import TENTHS_PER_S, timeline_figures
from outrider_bench.sample import Sample

PHASES = ("forward", "wait", "pack", "accept", "commit", "send")
"""The phases of a step that the verifier's counters tell apart."""
WAITS = ("wait_compute", "wait_network")
"""The parts of `wait` that spans tell apart."""
LOOKUPS = ("chain", "branch", "late", "miss")
"""The results of looking up committed tokens in the next draft."""

Figures = dict[str, float]
"""Numbers by name; units are in the names."""


def measurement_figures(measurement: Measurement, *, in_turn: bool) -> Figures:
    """The figures of all verifiers of one repetition together.

    Rates of verifiers that serve at the same time are added up. With `in_turn`, the rate is that of
    all tokens in the sum of all times.
    """
    samples = measurement.samples
    tokens = sum(sample.tokens for sample in samples)
    counters = _total(sample.counters for sample in samples)
    if in_turn:
        rate = tokens / sum(sample.seconds for sample in samples)
    else:
        rate = measurement.tokens_per_s
    return {
        "tokens_per_s": rate,
        **_latencies(samples),
        **_drafts(counters),
        **_step(counters, measurement.step_split_s),
        **_links(measurement, tokens),
        **_processors(measurement, tokens),
        **timeline_figures(_full(measurement), measurement.events),
    }


def sample_figures(sample: Sample) -> Figures:
    """The figures of one verifier, or of one turn."""
    return {
        "tokens_per_s": sample.tokens_per_s,
        **_latencies([sample]),
        **_drafts(sample.counters),
        **_step(sample.counters, {}),
    }


def _full(measurement: Measurement) -> list[int]:
    """The timeline until a verifier has fewer requests than its batch, if that is known."""
    ends_s = [sample.full_s for sample in measurement.samples if sample.full_s > 0.0]
    ends = [int(TENTHS_PER_S * end_s) for end_s in ends_s]
    return measurement.timeline[: min(ends, default=None)]


def _total(counters: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for each in counters:
        for name, value in each.items():
            total[name] = total.get(name, 0.0) + value
    return total


def _quotients(parts: Mapping[str, tuple[float, float]]) -> Figures:
    """Numerator over denominator by name; pairs with a denominator of 0 are left out."""
    return {name: over / under for name, (over, under) in parts.items() if under}


def _latencies(samples: Sequence[Sample]) -> Figures:
    """Times to the first token and per output token, in ms, over all requests."""
    found: Figures = {}
    for name in ("ttft", "tpot"):
        values = [value for sample in samples for value in getattr(sample, name)]
        if values:
            found[f"{name}_p50_ms"] = 1000 * median(values)
            whole = values if len(values) > 1 else values * 2  # quantiles need two values
            found[f"{name}_p99_ms"] = 1000 * quantiles(whole, n=100, method="inclusive")[98]
    return found


def _drafts(counters: Mapping[str, float]) -> Figures:
    """Acceptance by vLLM's definitions, and commits by the state of the next draft."""
    tokens = counters.get("generation_tokens", 0.0)
    drafts = counters.get("spec_decode_num_drafts", 0.0)
    drafted = counters.get("spec_decode_num_draft_tokens", 0.0)
    accepted = counters.get("spec_decode_num_accepted_tokens", 0.0)
    lookups = {result: counters.get(f"draft_lookups.{result}", 0.0) for result in LOOKUPS}
    looked_up = sum(lookups.values())
    forwards = counters.get("step_sequences_sum", 0.0)
    drafted_tokens = 0.0
    if drafted:
        drafted_tokens = tokens
    return _quotients(
        {
            "acceptance": (accepted, drafted),
            "accepted_length": (drafts + accepted, drafts),
            "tokens_per_forward": (tokens, forwards),
            "of_limit": (
                counters.get("decode_isolated_forward_seconds", 0.0),
                counters.get("decode_seconds", 0.0),
            ),
            "accepted_per_forward": (accepted, forwards if drafted else 0.0),
            **{f"lookup_{result}": (count, looked_up) for result, count in lookups.items()},
            "wasted_per_token": (counters.get("wasted_tokens", 0.0), drafted_tokens),
            "draft_bytes_per_token": (counters.get("draft_bytes", 0.0), drafted_tokens),
        }
    )


def _step(counters: Mapping[str, float], split_s: Mapping[str, float]) -> Figures:
    """Mean milliseconds of a step by phase, from the verifier's counters.

    Counters have the wait for drafts only as a whole. Recorded spans divide it into computing and
    network, in proportion to their times.
    """
    steps = counters.get("step_seconds_count", 0.0)
    phases_s = {phase: counters.get(f"step_phase_seconds.{phase}", 0.0) for phase in PHASES}
    found = _quotients({f"step_{name}_ms": (1000 * s, steps) for name, s in phases_s.items()})
    if not found:
        return {}
    waited_s = sum(split_s.get(part, 0.0) for part in WAITS)
    shares = _quotients({part: (split_s.get(part, 0.0), waited_s) for part in WAITS})
    parts = {f"step_{part}_ms": share * found["step_wait_ms"] for part, share in shares.items()}
    return {**found, **parts, "step_ms": sum(found.values())}


def _links(measurement: Measurement, tokens: int) -> Figures:
    """Bytes on each link, both ways, for each token of output."""
    parts: dict[str, tuple[float, float]] = {}
    for name, link in measurement.links.items():
        parts[f"link_{name}_up_bytes_per_token"] = (link.up_bytes, tokens)
        parts[f"link_{name}_down_bytes_per_token"] = (link.down_bytes, tokens)
    return _quotients(parts)


def _processors(measurement: Measurement, tokens: int) -> Figures:
    """CPU milliseconds for each token by process and in all."""
    cpu_s = measurement.cpu_s
    parts = {f"cpu_{name}_ms_per_token": (1000 * s, float(tokens)) for name, s in cpu_s.items()}
    if cpu_s:
        parts["cpu_ms_per_token"] = (1000 * sum(cpu_s.values()), tokens)
    return _quotients(parts)
