"""What every family of drafters is to the stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from outrider.messages import DraftBatch, Opened, Rule, Verdict


class Family(Protocol):
    """A way of drafting. Sequences it was not handed are ignored, so that late messages do no harm."""

    name: str
    distributions: frozenset[Rule]
    max_depth: int
    device: str

    def open(self, opened: Opened) -> None:
        """Take a sequence; cheap, like `verdict` and `close`, since all three run on the event loop, between two drafts."""

    def verdict(self, verdict: Verdict) -> None:
        """Follow a commit."""

    def close(self, sequence_id: int) -> None:
        """Drop a sequence and all its state."""

    async def draft(self, interrupted: Callable[[], bool]) -> DraftBatch:
        """What to propose now; empty when there is nothing to do before the next verdict.

        A draft that takes long looks at `interrupted` now and then and returns what it has once that is true: a verdict waits to be
        applied.
        """

    async def aclose(self) -> None:
        """Give everything back."""
