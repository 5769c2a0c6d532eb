"""Counts of each key's use in the current minute, in memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

MINUTE_S = 60


@dataclass(frozen=True, slots=True)
class Count:
    """A window's sum after an addition."""

    total: int
    minute: int = 0
    """The minute to which the amount was added, if that was in memory."""
    is_shared: bool = False
    """Whether the sum is in Redis."""


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
        total = self._add(name, amount, minute)
        return Count(total, self._minute)

    async def correct(self, name: str, amount: int, minute: int, counted: Count) -> None:
        """Add an amount, which may be negative, in the place where `counted` was counted."""
        # To lower the count of an earlier minute would change nothing.
        if amount > 0:
            self._add(name, amount, minute)
        elif counted.minute == self._minute:
            self._add(name, amount, counted.minute)

    def _add(self, name: str, amount: int, minute: int) -> int:
        # The last minute's amount, which Redis has refused late, counts in the current one. Before
        # that the clock was set back.
        if minute > self._minute or minute < self._minute - 1:
            self._minute = minute
            self._counts = {}
        total = max(0, self._counts.get(name, 0) + amount)
        self._counts[name] = total
        return total

    async def close(self) -> None:
        """Close all connections."""
