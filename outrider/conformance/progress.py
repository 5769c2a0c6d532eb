"""Shows how far a check is, with the time left."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import track

_Item = TypeVar("_Item")


def tracked(items: Sequence[_Item], what: str) -> Iterable[_Item]:
    """The items; a bar on standard error shows how many are done, if that is a terminal."""
    console = Console(stderr=True)
    return track(items, what, console=console, transient=True, disable=not console.is_terminal)
