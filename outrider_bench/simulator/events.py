"""Virtual time: a heap of events, and the clock that the whole simulated stack reads.

Every actor (an engine, a drafter, a link, the traffic) runs in its own events. An event begins with
the clock at its time and may move the clock forward: this is how work takes time. The next event
may begin before the previous event's end, because actors work at the same time. For each single
actor, time only goes forward.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any


class Events:
    """The events of one simulation. Events of the same time run in the order of scheduling."""

    def __init__(self) -> None:
        self.now = 0.0
        """The present time in seconds, which the present event may move forward."""
        self._heap: list[tuple[float, int, Callable[[], object]]] = []
        self._number = 0

    def clock(self) -> float:
        """Return the time; this is the `outrider.process.clock.Clock` of the simulated stack."""
        return self.now

    def spend(self, seconds: float) -> None:
        """Make the present event take `seconds`."""
        self.now += seconds

    def at(self, time: float, work: Callable[[], object]) -> None:
        """Run `work` at `time`; raise ValueError for a time in the past."""
        if time < self.now:
            raise ValueError(f"an event at {time} s lies before now, {self.now} s")
        self._number += 1
        heappush(self._heap, (time, self._number, work))

    def after(self, seconds: float, work: Callable[[], object]) -> None:
        """Run `work` `seconds` from now."""
        self.at(self.now + seconds, work)

    def run(self, until: float) -> None:
        """Run all events that are due by `until`, even if they are scheduled only meanwhile."""
        heap = self._heap
        while heap and heap[0][0] <= until:
            self.now, _, work = heappop(heap)
            work()


@dataclass(frozen=True, slots=True)
class Work:
    """A simulated drafter's coroutine awaits this to work in parts, until a message comes.

    `ends` are the times at which the parts end, in seconds from now, rising. The part that is in
    progress when a message comes is the last part that is done. The result is the number of parts
    done. Without parts, the coroutine sleeps until a message comes.
    """

    ends: list[float]

    def __await__(self) -> Generator[Work, int, int]:
        return (yield self)


@dataclass(frozen=True, slots=True)
class Until:
    """A simulated drafter's coroutine awaits this to sleep until `done`; messages do not end it.

    Awaiting raises the exception that `done` has.
    """

    done: Future[Any]

    def __await__(self) -> Generator[Until, int, None]:
        yield self
        self.done.result()
