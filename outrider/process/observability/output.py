"""A text stream whose writers never wait or fail, even if the disk is full or no reader is left."""

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
    """A text stream for `print` and rich, with a thread that writes to a file descriptor.

    While the descriptor takes nothing (a full disk, a stopped terminal), up to 1000 writes wait.
    Later writes are dropped, and a line says how many.
    """

    def __init__(self, descriptor: int, on_closed: Callable[[], None]) -> None:
        """The thread calls `on_closed` once if the other end of the pipe is closed."""
        self._descriptor = descriptor
        self._on_closed = on_closed
        self._waiting: queue.Queue[bytes | None] = queue.Queue(_WAITING_WRITES)
        self._dropped_count = 0
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)
        self._thread.start()

    def isatty(self) -> bool:
        """Return whether the descriptor is a terminal."""
        return os.isatty(self._descriptor)

    def write(self, text: str, /) -> int:
        """Queue the text for the thread, without ever waiting or raising."""
        notice = ""
        if self._dropped_count:
            notice = f"{self._dropped_count} lines were dropped: the log could not be written\n"
        try:
            self._waiting.put_nowait(f"{notice}{text}".encode(errors="replace"))
            self._dropped_count = 0
        except queue.Full:
            self._dropped_count += 1
        return len(text)

    def finish(self, timeout_s: float) -> None:
        """Write the queued text, for at most about twice `timeout_s`, and end the thread."""
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
        """Write the whole text; retry until `finish`. Raises BrokenPipeError."""
        while text:
            try:
                text = text[os.write(self._descriptor, text) :]
            except OSError as error:
                if error.errno == errno.EPIPE:
                    raise
                if self._ending.wait(_RETRY_S):
                    return
