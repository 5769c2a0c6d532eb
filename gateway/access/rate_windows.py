"""Counts of each key's use in the current minute, in memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

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
        # To lower the count of an earlier minute would change nothing.
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
