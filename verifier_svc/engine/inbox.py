"""Work that other threads hand to the engine's thread, in the order in which they post it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


class Inbox:
    """Any thread may call `post` and `stop`; the rest is for the thread that owns the inbox."""

    def __init__(self) -> None:
        self.stopped = False
        """Whether the owner has come to the work behind which it should stop."""
        self._work: deque[Callable[[], object]] = deque()
        self._posted = threading.Condition()

    def post(self, work: Callable[[], object]) -> None:
        """Have the owner run `work`."""
        with self._posted:
            self._work.append(work)
            self._posted.notify()

    def stop(self) -> None:
        """Have the owner stop once it has run what was posted before."""
        self.post(self._stop)

    def _stop(self) -> None:
        self.stopped = True

    def run_all(self) -> None:
        """Run everything that was posted; whatever a piece of work raises goes to the caller."""
        while self._work:
            self._work.popleft()()

    def wait(self, seconds: float | None) -> None:
        """Sleep until there is work, for at most so many seconds; None sets no limit.

        Nobody sleeps behind a stop.
        """
        if seconds == 0.0 or self.stopped:
            return
        with self._posted:
            self._posted.wait_for(self._has_work, seconds)

    def _has_work(self) -> bool:
        return bool(self._work)
