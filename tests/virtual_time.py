"""Time that passes only by what is said to take some, so that no test depends on how busy the machine is."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from types import TracebackType

import pytest

from verifier_svc.engine import Engine


class VirtualTime:
    """Stands in for `time.monotonic` and `time.sleep`, and for the waits of engines that run on the test's own thread."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()
        patch.setattr("time.monotonic", lambda: self.now)
        patch.setattr("time.sleep", self.sleep)

    def after(self, seconds: float, work: Callable[[], object]) -> None:
        """Do something once so much time has passed, in the middle of a sleep or wait."""
        heapq.heappush(self._due, (self.now + seconds, next(self._numbers), work))

    def sleep(self, seconds: float) -> None:
        end = self.now + seconds
        while self._step(end):
            pass

    def drives(self, engine: Engine) -> None:
        """Let the engine's waits pass this time; each ends with the next thing that happens."""
        engine._wake = _Condition(self)  # type: ignore[assignment]

    def wait(self, seconds: float | None) -> None:
        end = math.inf if seconds is None else self.now + seconds
        assert self._due or end < math.inf, "nothing will ever happen"
        self._step(end)

    def _step(self, end: float) -> bool:
        """Go on to what is due next, or to the end; whether something was."""
        if not self._due or self._due[0][0] > end:
            self.now = max(self.now, end)
            return False
        at, _, work = heapq.heappop(self._due)
        self.now = max(self.now, at)
        work()
        return True


class _Condition:
    """A condition variable of one thread."""

    def __init__(self, time: VirtualTime) -> None:
        self._time = time

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        pass

    def wait(self, timeout: float | None = None) -> None:
        self._time.wait(timeout)

    def notify(self) -> None:
        pass
