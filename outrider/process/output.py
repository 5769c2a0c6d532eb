"""Standard output that may be full, slow or gone: what writes here neither waits nor fails. Knows text, not what it means."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import queue
import threading
from collections.abc import Callable

# A line has at most 64 KiB.
_WAITING_WRITES = 1000
_RETRY_S = 0.5


class Output(io.TextIOBase):
    """A text file for `print` and rich, which a thread of its own writes to a file descriptor.

    While the descriptor takes nothing (a full disk, a terminal that was stopped), up to 1000 writes wait; later ones are dropped,
    and a line says how many. `on_closed` is called once, from the thread, when nobody will ever read again: the other end of the
    pipe is gone.
    """

    def __init__(self, descriptor: int, on_closed: Callable[[], None]) -> None:
        self._descriptor = descriptor
        self._on_closed = on_closed
        self._waiting: queue.Queue[bytes | None] = queue.Queue(_WAITING_WRITES)
        self._dropped_count = 0
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)
        self._thread.start()

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, text: str, /) -> int:
        """Leave the text to the thread; never waits, never raises."""
        notice = (
            f"{self._dropped_count} lines were dropped: the log could not be written\n"
            if self._dropped_count
            else ""
        )
        try:
            self._waiting.put_nowait(f"{notice}{text}".encode(errors="replace"))
            self._dropped_count = 0
        except queue.Full:
            self._dropped_count += 1
        return len(text)

    def finish(self, timeout_s: float) -> None:
        """Write what waits, unless that takes longer or fails."""
        self._ending.set()
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=timeout_s)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (text := self._waiting.get()) is not None:
            try:
                self._put(text)
            except BrokenPipeError:
                self._on_closed()
                return

    def _put(self, text: bytes) -> None:
        """Write all of it, trying again until `finish`; raises BrokenPipeError."""
        while text:
            try:
                text = text[os.write(self._descriptor, text) :]
            except OSError as error:
                if error.errno == errno.EPIPE:
                    raise
                if self._ending.wait(_RETRY_S):
                    return
