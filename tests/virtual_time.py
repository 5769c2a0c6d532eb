"""A clock that tests advance themselves, so that a busy machine changes no result."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable

from verifier_svc.engine.loop import Engine


class VirtualClock:
    """A clock for an engine, and the loop that calls `Engine.advance` and sleeps between calls."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()

    def __call__(self) -> float:
        return self.now

    def after(self, seconds: float, work: Callable[[], object]) -> None:
        """Call `work` when `seconds` have passed, even in the middle of a sleep or wait."""
        heapq.heappush(self._due, (self.now + seconds, next(self._numbers), work))

    def sleep(self, seconds: float) -> None:
        """Let time pass, and call everything that becomes due."""
        end = self.now + seconds
        while self._go_on(end):
            pass

    def step(self, engine: Engine) -> None:
        """Let the engine take its next step, including the wait for drafts before it."""
        while (rest_s := engine.advance()) != 0.0:
            self._wait(rest_s)

    def finish(self, engine: Engine) -> None:
        """Let the engine step until no sequence is left."""
        while engine.sequences:
            self.step(engine)

    def _wait(self, seconds: float | None) -> None:
        """Let time pass until something is due, at most for `seconds`."""
        end = math.inf if seconds is None else self.now + seconds
        assert self._due or end < math.inf, "nothing will ever be due"
        self._go_on(end)

    def _go_on(self, end: float) -> bool:
        """Advance to the next due call, or to `end`; return whether a call was due."""
        if not self._due or self._due[0][0] > end:
            self.now = max(self.now, end)
            return False
        at, _, work = heapq.heappop(self._due)
        self.now = max(self.now, at)
        work()
        return True
