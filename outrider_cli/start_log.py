"""Shows the start of the processes of `outrider serve` and `outrider demo`.

The start is shown as one status: on a terminal a line with a spinner, elsewhere a plain line for
each change. `outrider serve` also shows the processes' warnings, errors and tracebacks at once, and
the gateway's guesses about the model. Other INFO records and announcements are not shown: they only
repeat the status, or say that one process waits for another.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape

# A record in the format of `telemetry.setup_logging`, as text or JSON, or an announcement.
_PROGRESS = re.compile(
    r"\S+ \S+ INFO (?!.*format of tool calls)|"
    r'\{"time": "\S+", "level": "info", (?!.*format of tool calls)|'
    r"(gateway|verifier) listening on |verifier ready: |drafter \S+ registered with "
)
_MOST_HELD = 100


class StartLog:
    """Passes processes' lines to `write`, but holds back reports of progress until `ready`."""

    def __init__(self, write: Callable[[str, str], None]) -> None:
        """`write` takes the name of a process and one line of its output."""
        self._write = write
        self._held: deque[tuple[str, str]] = deque(maxlen=_MOST_HELD)
        self._is_ready = False

    def line(self, name: str, text: str) -> None:
        """Take one line of a process."""
        if not self._is_ready and _PROGRESS.match(text):
            self._held.append((name, text))
        else:
            self._write(name, text)

    def ready(self) -> None:
        """Drop the held lines, and pass on all later lines, since all processes serve now."""
        self._is_ready = True
        self._held.clear()

    def failed(self) -> None:
        """Write the held lines: the start has failed, and the last 100 lines may say why."""
        for name, text in self._held:
            self._write(name, text)
        self._held.clear()


@contextmanager
def start_status(console: Console, text: str) -> Iterator[Callable[[str], None]]:
    """Show `text` while the block runs; yield a function that replaces it."""
    if not console.is_terminal or console.is_dumb_terminal:
        console.print(text, markup=False)
        yield lambda state: console.print(state, markup=False)
        return
    with console.status(escape(text)) as status:
        yield lambda state: status.update(escape(state))
