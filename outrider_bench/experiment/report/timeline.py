"""The effect of events on the rate of tokens: gaps and times of recovery. Pure arithmetic.

A timeline is a list of tokens by tenths of a second since the first request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

TENTHS_PER_S = 10
BACK = 0.9
"""The rate is back once it is this share of the rate before the event."""
_BEFORE_TENTHS = 20
_WINDOW_TENTHS = 10


def timeline_figures(
    timeline: Sequence[int], events: Sequence[Mapping[str, Any]]
) -> dict[str, float]:
    """The longest gap, and for each event the rate before it and its recovery.

    Events are numbered from 1 in order of time. `timeline` should end when requests run out, or the
    end looks like a loss. `recovery_s` is absent if the rate did not come back within `watched_s`.
    All three are absent for an event with no tokens before it.
    """
    found: dict[str, float] = {}
    gap = longest_gap(timeline)
    if gap is not None:
        found["longest_gap_s"], found["longest_gap_at_s"] = gap
    for number, event in enumerate(sorted(events, key=lambda event: float(event["at"])), 1):
        at = float(event["at"])
        ends = [_end(other) for other in events if float(other["at"]) < at]
        before = rate_before(timeline, at, max(ends, default=0.0))
        if before:
            found[f"event_{number}_before_tokens_per_s"] = before
            watched_s = max(len(timeline) / TENTHS_PER_S - at, 0.0)
            found[f"event_{number}_watched_s"] = watched_s
            recovery = recovery_s(timeline, at, before)
            if recovery is not None:
                found[f"event_{number}_recovery_s"] = recovery
    return found


def longest_gap(timeline: Sequence[int]) -> tuple[float, float] | None:
    """Seconds of the longest stretch without a token between the first and the last, and its start.

    None for a timeline without tokens. Its resolution is a tenth of a second.
    """
    places = [place for place, count in enumerate(timeline) if count]
    if not places:
        return None
    gaps = [(later - place - 1, place + 1) for place, later in pairwise(places)]
    length, start = max(gaps, key=lambda gap: gap[0], default=(0, places[0]))
    return length / TENTHS_PER_S, start / TENTHS_PER_S


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
