"""What a way of drafting has to do. docs/drafters.md explains it with a whole drafter as its example."""

# ruff: noqa: B027  # hooks that a strategy may leave out
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from outrider.drafter.draft_sequence import DraftSequence
from outrider.limits import MAX_DRAFT_TOKENS
from outrider.messages import DraftDistribution


class Strategy(ABC):
    """A way of drafting, for one connection to a verifier.

    The session owns the sequences; a strategy owns its model or pool, and what it caches for each
    sequence. What a method raises for one sequence costs that sequence its drafts and nobody else
    anything. An OutriderError ends the connection, and an exception of a `fatal` type the process.
    """

    name: str
    distributions: frozenset[DraftDistribution] = frozenset({DraftDistribution.ONE_HOT})
    max_draft_tokens = MAX_DRAFT_TOKENS
    """Most guesses, one behind the other, that it ever offers for a step; at most 64."""
    device = "cpu"
    fatal: tuple[type[Exception], ...] = ()

    @abstractmethod
    async def propose(
        self, sequences: Sequence[DraftSequence], interrupted: Callable[[], bool]
    ) -> None:
        """Guess for these sequences with `sequence.extend` and `sequence.branch`.

        `sequence.goal` tokens are wanted of each now. A sequence for which nothing is offered is
        not asked for again before its next verdict, unless it is postponed. What takes long looks
        at `interrupted` now and then and returns once that is true: a message waits to be read.
        """

    def opened(self, sequence: DraftSequence) -> None:
        """A sequence begins. This and the next two run between two drafts and should be quick."""

    def committed(self, sequence: DraftSequence, standing: int) -> None:
        """A verdict was followed: of the tokens held before, the first `standing` still stand.

        The tokens held are the committed ones and the guesses behind them.
        """

    def closed(self, sequence: DraftSequence) -> None:
        """A sequence is over or given up; also after `opened` failed."""

    async def aclose(self) -> None:
        """The connection is over. Sequences are not closed one by one."""


Guess = Callable[[Sequence[int], int], Sequence[int]]
"""From a text, and how many tokens are wanted, to tokens that may follow it: fewer, or none."""


class GuessStrategy(Strategy):
    """Drafts with a function of the text: the committed tokens and the guesses behind them."""

    def __init__(self, guess: Guess, name: str) -> None:
        self.name = name
        self._guess = guess

    async def propose(
        self, sequences: Sequence[DraftSequence], interrupted: Callable[[], bool]
    ) -> None:
        for sequence in sequences:
            if interrupted():
                sequence.postpone()
            elif sequence.goal > 0:
                text = [*sequence.tokens, *sequence.guesses]
                sequence.extend(self._guess(text, sequence.goal))
