"""Makes the console, the tables and the bar that the benchmarks' commands print."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

# The seconds between two lines of progress where no bar can be shown.
_LINE_S = 10.0


def console_for_output(width: int = 200) -> Console:
    """Return a console on standard output; `width` is used if standard output is no terminal."""
    return Console(width=None if sys.stdout.isatty() else width)


def progress(console: Console | None = None) -> Progress:
    """Return a bar with the time left, on standard error unless a console is given.

    If there is no terminal, a line on standard error every 10 s says how far the work is.
    """
    shown = console or Console(stderr=True)
    if not shown.is_terminal:
        return _Lines(disable=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("time left:"),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=shown, transient=True)


class _Lines(Progress):
    """Shows progress as lines of a log."""

    _said_at: float | None = None

    def update(self, task_id: TaskID, **changes: Any) -> None:
        super().update(task_id, **changes)
        self._say(task_id)

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        super().advance(task_id, advance)
        self._say(task_id)

    def _say(self, task_id: TaskID) -> None:
        now = time.monotonic()
        if self._said_at is None:
            self._said_at = now
        if now - self._said_at < _LINE_S:
            return
        self._said_at = now
        task = self.tasks[self.task_ids.index(task_id)]
        total = "?" if task.total is None else f"{task.total:g}"
        print(f"{task.description}: {task.completed:g} of {total}", file=sys.stderr, flush=True)


def table_of(title: str, columns: Iterable[str], text: Iterable[str] = ()) -> Table:
    """Return a table.

    The first column and the columns in `text` are aligned to the left, the others to the right.
    """
    table = Table(title=title)
    left = set(text)
    for number, name in enumerate(columns):
        if number == 0 or name in left:
            table.add_column(name)
        else:
            table.add_column(name, justify="right")
    return table
