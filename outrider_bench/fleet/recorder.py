"""Gathers a run's figures, by hour and region."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider_bench.fleet.layout import Floats, Layout
from outrider_bench.fleet.requests import Requests
from outrider_bench.fleet.servers import BAD, GOOD, PLAIN
from outrider_bench.fleet.spec import Fleet

PERCENTILES = (50.0, 99.0, 99.9)


@dataclass(frozen=True, slots=True)
class Step:
    """The sums of one time step."""

    step_s: float
    ended: Requests
    made: Floats
    """Tokens behind the first of each request, by the region that made them."""
    first_count: int
    """First tokens."""
    under_way: Floats
    """Requests by the region that serves them, waiting ones included."""
    kinds: NDArray[np.int64]
    """Running requests by class."""
    busy: Floats
    """Share of the time in which each drafter drafts, by verifier of its group."""
    arrived: tuple[int, int]
    """New requests, and those of them that went to another region."""


@dataclass(slots=True)
class _Hour:
    hour: int
    seconds: float = 0.0
    steps: int = 0
    made: Floats = field(default_factory=lambda: np.zeros(0))
    under_way: Floats = field(default_factory=lambda: np.zeros(0))
    first_count: int = 0
    kinds: Floats = field(default_factory=lambda: np.zeros(3))
    busy: float = 0.0
    arrived: int = 0
    abroad: int = 0
    region: list[NDArray[np.int64]] = field(default_factory=list)
    ttft_s: list[Floats] = field(default_factory=list)
    tpot_s: list[Floats] = field(default_factory=list)


class Recorder:
    """Sums steps by hour; `hours` and `overall` make figures of them."""

    def __init__(self, fleet: Fleet, layout: Layout) -> None:
        self._regions = layout.regions
        self._drafters = layout.drafter_count
        self._fleet = fleet
        self._hours: list[_Hour] = []

    def begin(self, hour: int) -> None:
        """Begin an hour: later steps are added to it."""
        zeros = np.zeros(len(self._regions))
        self._hours.append(_Hour(hour, made=zeros.copy(), under_way=zeros.copy()))

    def add(self, step: Step) -> None:
        """Add a step to the hour."""
        now = self._hours[-1]
        now.seconds += step.step_s
        now.steps += 1
        now.made += step.made
        now.under_way += step.under_way
        now.first_count += step.first_count
        now.kinds += step.kinds
        now.busy += float(step.busy.mean()) if self._drafters else 0.0
        now.arrived += step.arrived[0]
        now.abroad += step.arrived[1]
        now.region.append(step.ended.region)
        now.ttft_s.append(step.ended.first_at - step.ended.sent_at)
        tokens = np.maximum(step.ended.length - 1, 1)
        now.tpot_s.append((step.ended.served_until - step.ended.first_at) / tokens)

    def hours(self) -> list[dict[str, Any]]:
        """A record for each hour, with one for each region in it."""
        return [self._figures([hour]) | {"hour": hour.hour} for hour in self._hours]

    def overall(self) -> dict[str, Any]:
        """The same over all hours."""
        return self._figures(self._hours)

    def _figures(self, hours: list[_Hour]) -> dict[str, Any]:
        seconds = sum(h.seconds for h in hours)
        steps = sum(h.steps for h in hours)
        region = np.concatenate([part for h in hours for part in h.region])
        ttft_s = np.concatenate([part for h in hours for part in h.ttft_s])
        tpot_s = np.concatenate([part for h in hours for part in h.tpot_s])
        kinds = np.sum([h.kinds for h in hours], axis=0)
        shares = kinds / max(kinds.sum(), 1.0)
        made = np.sum([h.made for h in hours], axis=0) / seconds
        under_way = np.sum([h.under_way for h in hours], axis=0) / steps
        arrived = sum(h.arrived for h in hours)
        return {
            "tokens_per_s": float(made.sum() + sum(h.first_count for h in hours) / seconds),
            "under_way": float(under_way.sum()),
            "requests_per_s": len(region) / seconds,
            "abroad_share": sum(h.abroad for h in hours) / max(arrived, 1),
            "drafter_busy": sum(h.busy for h in hours) / steps,
            "good_link_share": float(shares[GOOD]),
            "bad_link_share": float(shares[BAD]),
            "undrafted_share": float(shares[PLAIN]),
            **_latencies(ttft_s, tpot_s),
            "regions": {
                name: {
                    "tokens_per_s": float(made[number]),
                    "under_way": float(under_way[number]),
                    **_latencies(ttft_s[region == number], tpot_s[region == number]),
                }
                for number, name in enumerate(self._regions)
            },
        }


def _latencies(ttft_s: Floats, tpot_s: Floats) -> dict[str, Any]:
    """Milliseconds by percentile; none where no request ended."""
    if not len(ttft_s):
        return {"requests": 0}
    found: dict[str, Any] = {"requests": len(ttft_s), "tpot_mean_ms": 1000 * float(tpot_s.mean())}
    for name, values in (("ttft", ttft_s), ("tpot", tpot_s)):
        points = np.percentile(values, PERCENTILES)
        for percentile, value in zip(PERCENTILES, points, strict=True):
            found[f"{name}_p{percentile:g}_ms"] = 1000 * float(value)
    return found
