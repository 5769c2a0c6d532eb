"""Verifiers by region, groups of verifiers that share drafters, and traffic by hour."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider_bench.fleet.servers import CLASS_COUNT, GOOD, PLAIN, Servers
from outrider_bench.fleet.spec import Fleet

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Layout:
    """Numbers of verifiers, groups and draft processes, from 0 on. An unused place is -1."""

    regions: list[str]
    region_of: Ints
    """Of each verifier, shape (V,)."""
    group_of: Ints
    """Of each verifier, shape (V,)."""
    verifiers_of: Ints
    """Of each region, shape (regions, most verifiers of one)."""
    drafters_of: Ints
    """Of each group, shape (groups, most processes of one)."""
    group_sizes: Ints
    """Verifiers of each group."""
    drafter_count: int


def lay_out(fleet: Fleet) -> Layout:
    """Number everything. A region's last group may be smaller, and then has fewer processes."""
    drafters = fleet.drafters
    region_of: list[int] = []
    group_of: list[int] = []
    sizes: list[int] = []
    for number, region in enumerate(fleet.regions.values()):
        region_of += [number] * region.verifiers
        for begin in range(0, region.verifiers, drafters.shared_by):
            size = min(drafters.shared_by, region.verifiers - begin)
            group_of += [len(sizes)] * size
            sizes.append(size)
    counts = [math.ceil(drafters.count * size / drafters.shared_by) for size in sizes]
    return Layout(
        regions=list(fleet.regions),
        region_of=np.array(region_of),
        group_of=np.array(group_of),
        verifiers_of=_rows([region.verifiers for region in fleet.regions.values()]),
        drafters_of=_rows(counts),
        group_sizes=np.array(sizes),
        drafter_count=sum(counts),
    )


def _rows(counts: list[int]) -> Ints:
    """Consecutive numbers, so many in each row, and -1 behind them."""
    rows = np.full((len(counts), max(*counts, 1)), -1, dtype=np.int64)
    begin = 0
    for row, count in zip(rows, counts, strict=True):
        row[:count] = np.arange(begin, begin + count)
        begin += count
    return rows


def peak_rates(fleet: Fleet, servers: Servers) -> Floats:
    """New requests a second of each region in its busiest hour, by Little's law.

    They keep `peak_sequences` under way at the region's own verifiers, if all links are good.
    """
    most = fleet.verifiers.max_sequences
    output = (fleet.traffic.output_tokens[0] + fleet.traffic.output_tokens[-1]) / 2
    kind = PLAIN
    if fleet.drafters.count:
        kind = GOOD
    found = []
    for region in fleet.regions.values():
        load = np.array([min(region.peak_sequences / region.verifiers, most)])
        shares = np.zeros((1, CLASS_COUNT))
        shares[0, kind] = 1.0
        each = load * fleet.drafters.shared_by / max(fleet.drafters.count, 1)
        slowness = servers.slowness(load, each, fleet.drafters)
        token_s = servers.speeds(load, shares, slowness).token_s[0, kind]
        middle = np.full(1, 0.5)
        ttft_s = servers.draw_ttft(load, np.array([kind]), middle, middle)[0]
        found.append(region.peak_sequences / (ttft_s + (output - 1) * token_s))
    return np.array(found)


def rates_at(fleet: Fleet, peaks: Floats, hour: float) -> Floats:
    """New requests a second of each region at an hour of the day, UTC."""
    traffic = fleet.traffic
    offsets = np.array([region.utc_offset_hours for region in fleet.regions.values()])
    phase = 2.0 * np.pi * (hour + offsets - traffic.peak_hour) / 24.0
    day = (1.0 + np.cos(phase)) / 2.0
    rates: Floats = peaks * (traffic.night_share + (1.0 - traffic.night_share) * day)
    return rates
