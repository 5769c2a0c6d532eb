"""Reads a quiet stack: the metrics that should be 0, and the sizes of processes."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

_LOOK_S = 0.2
_ZERO_WHEN_QUIET = (
    "outrider:num_requests_running",
    "outrider:num_requests_waiting",
    "outrider:num_requests_unread",
    "outrider:kv_cache_usage_perc",
    "outrider:integrity_failures_total",
)
"""Metrics that are 0 while no request runs."""


async def within(seconds: float, holds: Callable[[], Awaitable[bool]]) -> bool:
    """Return whether a condition becomes true within some seconds."""
    until = time.monotonic() + seconds
    while not await holds():
        if time.monotonic() > until:
            return False
        await asyncio.sleep(_LOOK_S)
    return True


async def in_use(http: httpx.AsyncClient, urls: Mapping[str, str]) -> dict[str, float]:
    """Return, from all `urls`, the metrics that are not 0 although no request runs.

    A URL that does not answer counts as such a metric.
    """
    found = {}
    for name, url in urls.items():
        try:
            text = (await http.get(f"{url}/metrics")).text
        except httpx.TransportError:
            found[f"{name} answers no /metrics"] = 1.0
            continue
        samples = [s for f in text_string_to_metric_families(text) for s in f.samples]
        for sample in samples:
            if sample.name in _ZERO_WHEN_QUIET and sample.value:
                found[f"{name} {sample.name}"] = sample.value
    return found


def size_of(pid: int) -> dict[str, float]:
    """Return a process's id, its numbers of open files and threads, and its resident memory."""
    place = Path("/proc", str(pid))
    pages = int((place / "statm").read_text().split()[1])
    return {
        "pid": pid,
        "files": len(os.listdir(place / "fd")),
        "threads": len(os.listdir(place / "task")),
        "mebibytes": round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1),
    }


def address_space(pid: int) -> int:
    """Return the size of a process's address space in bytes."""
    pages = int(Path("/proc", str(pid), "statm").read_text().split()[0])
    return pages * os.sysconf("SC_PAGE_SIZE")
