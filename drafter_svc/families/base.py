"""What a family of drafters has to do. docs/drafters.md explains it with a whole family as its example."""

# ruff: noqa: B027  # hooks that a family may leave out
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from drafter_svc.draft_sequence import DraftSequence
from outrider.messages import MAX_DEPTH, Rule


class Family(ABC):
    """A way of drafting, for one connection to a verifier.

    The session owns the sequences; a family owns its model or pool, and what it caches for each sequence. What a method raises for
    one sequence costs that sequence its drafts and nobody else anything. An OutriderError ends the connection, and an exception of
    a `fatal` type the process.
    """

    name: str
    distributions: frozenset[Rule] = frozenset({Rule.ONE_HOT})
    max_draft_tokens = MAX_DEPTH
    """Most guesses, one behind the other, that it ever offers for a step; at most 64."""
    device = "cpu"
    fatal: tuple[type[Exception], ...] = ()

    @abstractmethod
    async def propose(self, sequences: Sequence[DraftSequence], interrupted: Callable[[], bool]) -> None:
        """Guess for these sequences with `sequence.extend` and `sequence.branch`; `sequence.goal` tokens are wanted of each now.

        A sequence for which nothing is offered is not asked for again before its next verdict, unless it is postponed. What takes
        long looks at `interrupted` now and then and returns once that is true, since a message of the verifier waits to be read.
        """

    def opened(self, sequence: DraftSequence) -> None:
        """A sequence begins. This and the next two run between two drafts and should be quick."""

    def committed(self, sequence: DraftSequence, standing: int) -> None:
        """A verdict was followed: of the tokens held before, committed ones and guesses behind them, the first `standing` stand."""

    def closed(self, sequence: DraftSequence) -> None:
        """A sequence is over or given up; also after `opened` failed."""

    async def aclose(self) -> None:
        """The connection is over. Sequences are not closed one by one."""
