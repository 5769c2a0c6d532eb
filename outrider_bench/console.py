"""Makes the console, the tables and the bar that the benchmarks' commands print."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table


def console_for_output(width: int = 200) -> Console:
    """A console on standard output; `width` is used where standard output is no terminal."""
    return Console(width=None if sys.stdout.isatty() else width)


def progress(console: Console | None = None) -> Progress:
    """A bar with the time left, on standard error unless a console is given.

    Nothing is shown where that is no terminal.
    """
    shown = console or Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("time left:"),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=shown, transient=True, disable=not shown.is_terminal)


def table_of(title: str, columns: Iterable[str], text: Iterable[str] = ()) -> Table:
    """A table whose columns are aligned to the right, except the first and those in `text`."""
    table = Table(title=title)
    left = set(text)
    for number, name in enumerate(columns):
        if number == 0 or name in left:
            table.add_column(name)
        else:
            table.add_column(name, justify="right")
    return table
