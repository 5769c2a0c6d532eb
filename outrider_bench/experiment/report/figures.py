"""The figures of one measurement. This is arithmetic without cells, files or pictures.

A figure whose denominator is 0, or whose counters were not recorded, is absent.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from statistics import median, quantiles

from outrider_bench.experiment.records import Measurement
from outrider_bench.sample import PER_POSITION, Sample

PHASES = ("forward", "wait", "pack", "accept", "commit", "send")
"""The phases of a step that the verifier's counters tell apart."""
LOOKUPS = ("chain", "branch", "late", "miss")
"""The results of looking up committed tokens in the next draft."""
POSITIONS = range(1, 9)
"""The positions in a draft that tables show; files have all."""

Figures = dict[str, float]
"""Maps a name, which ends in the unit, to a number."""


def figures_of(measurement: Measurement) -> Figures:
    """Return the figures of one repetition."""
    return {**sample_figures(measurement.sample), **_costs(measurement)}


def sample_figures(sample: Sample) -> Figures:
    """Return the figures of a load, without bytes on links and CPU time."""
    return {
        "tokens_per_s": sample.tokens_per_s,
        **_latencies(sample),
        **_drafts(sample.counters),
        **_apart(sample.counters, sample.by_kind),
        **_step(sample.counters),
    }


def groups_of(figures: Iterable[str]) -> list[str]:
    """Return the drafter families and kinds of prompts that these figures' names mention.

    Each is returned as `family_NAME` or `kind_NAME`.
    """
    found = [re.fullmatch(r"((?:family|kind)_.+)_acceptance", name) for name in figures]
    return list(dict.fromkeys(match[1] for match in found if match))


def _quotients(parts: Mapping[str, tuple[float, float]]) -> Figures:
    """Divide each named numerator by its denominator; leave out denominators of 0."""
    return {name: over / under for name, (over, under) in parts.items() if under}


def _latencies(sample: Sample) -> Figures:
    """Return the median and the 99th percentile of TTFT and TPOT over all requests, in ms."""
    found: Figures = {}
    for name in ("ttft", "tpot"):
        values = getattr(sample, name)
        if values:
            found[f"{name}_p50_ms"] = 1000 * median(values)
            whole = values if len(values) > 1 else values * 2  # `quantiles` needs two values
            found[f"{name}_p99_ms"] = 1000 * quantiles(whole, n=100, method="inclusive")[98]
    return found


def _drafts(counters: Mapping[str, float]) -> Figures:
    """Return acceptance as vLLM defines it, and further figures of drafts.

    `lookup_RESULT` is the share of commits whose lookup had this one of the results `LOOKUPS`.
    """
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
    """Return acceptance as numerators and denominators, overall and at each draft position."""
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


def _apart(counters: Mapping[str, float], kinds: Mapping[str, Mapping[str, float]]) -> Figures:
    """Return acceptance for each drafter family (`family_`) and each kind of prompt (`kind_`)."""
    groups: dict[str, Mapping[str, float]] = {
        f"kind_{kind or 'any'}": own for kind, own in kinds.items()
    }
    families: dict[str, dict[str, float]] = {}
    for key, count in counters.items():
        family, colon, own = key.partition(":")
        if colon:
            families.setdefault(f"family_{family}", {})[own] = count
    return {
        f"{group}_{name}": figure
        for group, own in (families | groups).items()
        for name, figure in _quotients(_acceptance(own)).items()
    }


def _step(counters: Mapping[str, float]) -> Figures:
    """Return the mean milliseconds of each phase of a step, from the verifier's counters."""
    steps = counters.get("step_seconds_count", 0.0)
    phases_s = {phase: counters.get(f"step_phase_seconds.{phase}", 0.0) for phase in PHASES}
    found = _quotients({f"step_{name}_ms": (1000 * s, steps) for name, s in phases_s.items()})
    return {**found, "step_ms": sum(found.values())} if found else {}


def _costs(measurement: Measurement) -> Figures:
    """Return the cost of a token: bytes on each link in each direction, CPU ms of each process."""
    spent: Figures = {}
    for name, link in measurement.links.items():
        spent[f"link_{name}_up_bytes"] = link.up_bytes
        spent[f"link_{name}_down_bytes"] = link.down_bytes
    for name, seconds in measurement.cpu_s.items():
        spent[f"cpu_{name}_ms"] = 1000 * seconds
        spent["cpu_ms"] = spent.get("cpu_ms", 0.0) + 1000 * seconds
    tokens = measurement.sample.tokens
    return _quotients({f"{name}_per_token": (spent[name], tokens) for name in spent})
