"""The figures of one measurement. Pure arithmetic: knows no cells, files or pictures.

A timeline is a list of tokens by tenths of a second since the first request.

A figure whose denominator is 0, or whose counters were not recorded, is absent.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import median, quantiles
from typing import Any

from outrider_bench.experiment.records import Measurement
from outrider_bench.sample import PER_POSITION, Sample

PHASES = ("forward", "wait", "pack", "accept", "commit", "send")
"""The phases of a step that the verifier's counters tell apart."""
LOOKUPS = ("chain", "branch", "late", "miss")
"""The results of looking up committed tokens in the next draft."""
POSITIONS = range(1, 9)
"""The positions in a draft that tables show; files have all."""
TENTHS_PER_S = 10
BACK = 0.9
"""The rate is back once it is this share of the rate before the event."""
_BEFORE_TENTHS = 20
_WINDOW_TENTHS = 10

Figures = dict[str, float]
"""Numbers by name; units are in the names."""


def measurement_figures(measurement: Measurement) -> Figures:
    """The figures of all verifiers of one repetition together. Their rates are added up."""
    samples = measurement.samples
    tokens = sum(sample.tokens for sample in samples)
    counters = _total(sample.counters for sample in samples)
    return {
        "tokens_per_s": measurement.tokens_per_s,
        **_latencies(samples),
        **_drafts(counters),
        **_apart(counters, [sample.by_kind for sample in samples]),
        **_step(counters),
        **_costs(measurement, tokens),
        **timeline_figures(_full(measurement), measurement.events),
    }


def sample_figures(sample: Sample) -> Figures:
    """The figures of one verifier."""
    return {
        "tokens_per_s": sample.tokens_per_s,
        **_latencies([sample]),
        **_drafts(sample.counters),
        **_apart(sample.counters, [sample.by_kind]),
        **_step(sample.counters),
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


def groups_of(figures: Iterable[str]) -> list[str]:
    """The families and kinds whose acceptance is among these names, as `family_` and `kind_`."""
    found = [re.fullmatch(r"((?:family|kind)_.+)_acceptance", name) for name in figures]
    return list(dict.fromkeys(match[1] for match in found if match))


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
            **_acceptance(counters),
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


def _acceptance(counters: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    """Acceptance, whole and by position in the draft from 1, as numerators and denominators."""
    drafts = counters.get("spec_decode_num_drafts", 0.0)
    accepted = counters.get("spec_decode_num_accepted_tokens", 0.0)
    places = {key: key.removeprefix(PER_POSITION) for key in counters if PER_POSITION in key}
    at = {place: counters[key] for key, place in places.items() if place.isdigit()}
    return {
        "drafts": (drafts, 1.0 if drafts else 0.0),
        "acceptance": (accepted, counters.get("spec_decode_num_draft_tokens", 0.0)),
        "accepted_length": (drafts + accepted, drafts),
        **{f"accepted_at_{int(place) + 1}": (n, drafts) for place, n in at.items() if n},
    }


def _apart(counters: Mapping[str, float], kinds: Sequence[Mapping[str, Any]]) -> Figures:
    """Acceptance by family of drafters and by kind of prompts, under `family_` and `kind_`."""
    groups: dict[str, dict[str, float]] = {}
    for key, count in counters.items():
        family, colon, own = key.partition(":")
        if colon:
            groups.setdefault(f"family_{family}", {})[own] = count
    for kind in dict.fromkeys(kind for each in kinds for kind in each):
        groups[f"kind_{kind or 'any'}"] = _total(each.get(kind, {}) for each in kinds)
    return {
        f"{group}_{name}": figure
        for group, own in groups.items()
        for name, figure in _quotients(_acceptance(own)).items()
    }


def _step(counters: Mapping[str, float]) -> Figures:
    """Mean milliseconds of a step by phase, from the verifier's counters."""
    steps = counters.get("step_seconds_count", 0.0)
    phases_s = {phase: counters.get(f"step_phase_seconds.{phase}", 0.0) for phase in PHASES}
    found = _quotients({f"step_{name}_ms": (1000 * s, steps) for name, s in phases_s.items()})
    return {**found, "step_ms": sum(found.values())} if found else {}


def _costs(measurement: Measurement, tokens: int) -> Figures:
    """For each token: bytes on each link, both ways, and CPU milliseconds by process and in all."""
    spent: Figures = {}
    for name, link in measurement.links.items():
        spent[f"link_{name}_up_bytes"] = link.up_bytes
        spent[f"link_{name}_down_bytes"] = link.down_bytes
    for name, seconds in measurement.cpu_s.items():
        spent[f"cpu_{name}_ms"] = 1000 * seconds
        spent["cpu_ms"] = spent.get("cpu_ms", 0.0) + 1000 * seconds
    return _quotients({f"{name}_per_token": (spent[name], tokens) for name in spent})


def timeline_figures(
    timeline: Sequence[int], events: Sequence[Mapping[str, Any]]
) -> dict[str, float]:
    """The longest gap, and for each event the rate before it and its recovery.

    Events are numbered from 1 in order of time. `timeline` should end when requests run out, or the
    end looks like a loss. `recovery_s` is absent if the rate did not come back. Both are absent for
    an event with no tokens before it.
    """
    found: dict[str, float] = {}
    gap = longest_gap(timeline)
    if gap is not None:
        found["longest_gap_s"] = gap
    for number, event in enumerate(sorted(events, key=lambda event: float(event["at"])), 1):
        at = float(event["at"])
        ends = [_end(other) for other in events if float(other["at"]) < at]
        before = rate_before(timeline, at, max(ends, default=0.0))
        if before:
            found[f"event_{number}_before_tokens_per_s"] = before
            recovery = recovery_s(timeline, at, before)
            if recovery is not None:
                found[f"event_{number}_recovery_s"] = recovery
    return found


def longest_gap(timeline: Sequence[int]) -> float | None:
    """Seconds of the longest stretch without a token between the first and the last.

    None for a timeline without tokens. Its resolution is a tenth of a second.
    """
    places = [place for place, count in enumerate(timeline) if count]
    if not places:
        return None
    gaps = [later - place - 1 for place, later in pairwise(places)]
    return max(gaps, default=0) / TENTHS_PER_S


def rate_before(timeline: Sequence[int], at_s: float, earliest_s: float = 0.0) -> float:
    """Mean tokens/s of the last two seconds before `at_s`, but not before `earliest_s`."""
    end = min(int(at_s * TENTHS_PER_S), len(timeline))
    start = max(end - _BEFORE_TENTHS, round(earliest_s * TENTHS_PER_S), 0)
    if end <= start:
        return 0.0
    return TENTHS_PER_S * sum(timeline[start:end]) / (end - start)


def recovery_s(timeline: Sequence[int], at_s: float, before: float) -> float | None:
    """Seconds from an event until a second begins with 90 % of the rate `before`, in tokens/s.

    0 if the rate stayed above that; None if it never came back.
    """
    first = int(at_s * TENTHS_PER_S)
    for start in range(first, len(timeline) - _WINDOW_TENTHS + 1):
        if sum(timeline[start : start + _WINDOW_TENTHS]) >= BACK * before:
            return max(start / TENTHS_PER_S - at_s, 0.0)
    return None


def _end(event: Mapping[str, Any]) -> float:
    return float(event["at"]) + float(event.get("seconds", 0.0))
