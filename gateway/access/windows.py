"""Counts of each key's use in the current minute, in memory or in a Redis that gateways share."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

MINUTE_S = 60


class Windows:
    """Fixed windows that begin with each minute of the wall clock."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._minute = 0
        self._counts: dict[str, int] = {}

    def now(self) -> tuple[int, float]:
        """The current minute, counted from the epoch, and the seconds that are left of it."""
        minute, seconds = divmod(self._clock(), MINUTE_S)
        return int(minute), MINUTE_S - seconds

    async def add(self, name: str, amount: int, minute: int) -> int:
        """Add to a count of the current minute and return the sum."""
        if minute != self._minute:
            self._minute = minute
            self._counts = {}
        total = self._counts.get(name, 0) + amount
        self._counts[name] = total
        return total

    async def close(self) -> None:
        """Close all connections."""


def windows(url: str, password_file: Path | None, ca_file: Path | None) -> Windows:
    """Windows in memory, or in the Redis of a URL.

    Raises OutriderError(INVALID_VALUE) for a wrong URL and a file that cannot be read.
    """
    if not url:
        return Windows()
    # It loads clients of Redis, which takes 0.1 s.
    from gateway.access.redis_windows import RedisWindows, storage_of

    return RedisWindows(storage_of(url, password_file, ca_file))
