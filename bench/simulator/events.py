"""Virtual time: a heap of things to do, and the clock that all of the simulated stack reads.

Every actor (an engine, a drafter, a link, the traffic) runs in events of its own. An event begins with the clock at its time and
may move the clock forward, which is how work takes time. The next event may lie before the point where the last one left the
clock, since actors work at the same time; for each actor alone time only goes forward.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import dataclass
from heapq import heappop, heappush


class Events:
    """The events of one simulation. Events of one time run in the order in which they were scheduled."""

    def __init__(self) -> None:
        self.now = 0.0
        """The present event's time in seconds."""
        self._heap: list[tuple[float, int, Callable[[], object]]] = []
        self._number = 0

    def clock(self) -> float:
        """The `outrider.clock.Clock` of everything simulated."""
        return self.now

    def spend(self, seconds: float) -> None:
        """Let the present event take so long."""
        self.now += seconds

    def at(self, time: float, work: Callable[[], object]) -> None:
        """Run `work` at a time that is not before now; raises ValueError for one that is."""
        if time < self.now:
            raise ValueError(f"an event at {time} s lies before now, {self.now} s")
        self._number += 1
        heappush(self._heap, (time, self._number, work))

    def after(self, seconds: float, work: Callable[[], object]) -> None:
        """Run `work` so many seconds from now."""
        self.at(self.now + seconds, work)

    def run(self, until: float) -> None:
        """Run all events up to and including `until`, those scheduled meanwhile too."""
        heap = self._heap
        while heap and heap[0][0] <= until:
            self.now, _, work = heappop(heap)
            work()


@dataclass(frozen=True, slots=True)
class Work:
    """Awaited by a simulated drafter's coroutine: work in parts, of which one ends after each of `ends` (seconds from now, rising).

    Once a message has come the part in progress is the last. The result is how many parts were done. Without parts it is a
    sleep until a message comes.
    """

    ends: list[float]

    def __await__(self) -> Generator[Work, int, int]:
        return (yield self)


@dataclass(frozen=True, slots=True)
class Until:
    """Awaited by a simulated drafter's coroutine: it goes on when this is done, and messages wait meanwhile."""

    done: Future[None]

    def __await__(self) -> Generator[Until, int, int]:
        return (yield self)
