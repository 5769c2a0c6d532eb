"""Counts of each key's use in the current minute, in memory or in a Redis that gateways share."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from outrider.errors import OutriderError
from outrider.process.tls import Tls

MINUTE_S = 60


@dataclass(frozen=True, slots=True)
class Count:
    """A window's sum after an addition, and whether it is in Redis."""

    total: int
    is_shared: bool = False


class RateWindows:
    """Fixed windows that begin with each minute of the wall clock."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._minute = 0
        self._counts: dict[str, int] = {}

    def now(self) -> tuple[int, float]:
        """The current minute, counted from the epoch, and the seconds that are left of it."""
        minute, seconds = divmod(self._clock(), MINUTE_S)
        return int(minute), MINUTE_S - seconds

    async def add(self, name: str, amount: int, minute: int) -> Count:
        """Add to a count of a minute."""
        return Count(self._add(name, amount, minute))

    async def correct(self, name: str, amount: int, minute: int, counted: Count) -> None:
        """Add an amount, which may be negative, in the place where `counted` was counted."""
        # Counts of an earlier minute are of no use in this one.
        if amount > 0 or minute >= self._minute:
            self._add(name, amount, minute)

    def _add(self, name: str, amount: int, minute: int) -> int:
        # An earlier minute's amount, which Redis has refused late, counts in the current one.
        if minute > self._minute:
            self._minute = minute
            self._counts = {}
        total = max(0, self._counts.get(name, 0) + amount)
        self._counts[name] = total
        return total

    async def close(self) -> None:
        """Close all connections."""


def rate_windows(
    url: str, password_file: Path | None = None, tls: Tls | None = None
) -> RateWindows:
    """Rate windows in memory, or in the Redis of a URL; `tls` has this process's certificate.

    Raises OutriderError(INVALID_VALUE) for a wrong URL and a file that cannot be read.
    """
    if not url:
        return RateWindows()
    # These load clients of Redis, which takes 0.1 s.
    from gateway.access.redis_rate_windows import Counters, RedisRateWindows
    from outrider.process.redis_server import RedisServer

    try:
        server = RedisServer.parse(url, password_file, tls)
    except OutriderError as error:
        # It names the settings of a drafter, which lack the prefix.
        message = f"limits-{error.message}"
        raise OutriderError(error.reason, message, f"limits-{error.field}") from error
    return RedisRateWindows(Counters(server))
