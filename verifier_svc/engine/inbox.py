"""Work that other threads post to the engine's thread, in order."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


class Inbox:
    """Any thread may call `post` and `stop`; the rest is for the thread that owns the inbox."""

    def __init__(self) -> None:
        self.stopped = False
        """Whether the owner has reached a `stop` among the posted work."""
        self._work: deque[Callable[[], object]] = deque()
        self._posted = threading.Condition()

    def post(self, work: Callable[[], object]) -> None:
        """Have the owner run `work`."""
        with self._posted:
            self._work.append(work)
            self._posted.notify()

    def stop(self) -> None:
        """Have the owner stop once it has run the work posted so far."""
        self.post(self._stop)

    def _stop(self) -> None:
        self.stopped = True

    def run_all(self) -> None:
        """Run all posted work; an exception of the work goes to the caller."""
        while self._work:
            self._work.popleft()()

    def wait(self, seconds: float | None) -> None:
        """Sleep until there is work, for at most `seconds`; None sets no limit.

        Returns at once after a stop.
        """
        if seconds == 0.0 or self.stopped:
            return
        with self._posted:
            self._posted.wait_for(self._has_work, seconds)

    def _has_work(self) -> bool:
        return bool(self._work)
