"""The interface of a drafting method. docs/drafters.md explains it with a complete example."""

# ruff: noqa: B027  # hooks that a strategy may leave out
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from outrider.drafter.draft_sequence import DraftSequence
from outrider.protocol.draft_messages import FeatureRequest, FeatureRows, Welcome
from outrider.protocol.limits import MAX_DRAFT_TOKENS
from outrider.protocol.messages import DraftDistribution


class Strategy(ABC):
    """A drafting method, for one connection to a verifier.

    The session owns the sequences; a strategy owns its model or pool and its caches for each
    sequence. When a method raises, only the sequence that it worked on loses its drafts. An
    OutriderError ends the connection, and an exception of a `fatal` type ends the process.
    """

    name: str
    distributions: frozenset[DraftDistribution] = frozenset({DraftDistribution.ONE_HOT})
    max_draft_tokens = MAX_DRAFT_TOKENS
    """The length of the longest chain that the strategy ever offers for a step; at most 64."""
    device = "cpu"
    gpu_uuid = ""
    weights_version = ""
    """The version of the weights for the verifier's metrics; empty without weights."""
    feature_request: FeatureRequest | None = None
    """The target's hidden states that the strategy reads; None if it reads no states."""
    requires_grammar = False
    """True if the verifier should open to the strategy only sequences that have a grammar."""
    fatal: tuple[type[Exception], ...] = ()

    def welcomed(self, welcome: Welcome) -> None:
        """Take the verifier's answer to the Hello.

        Raise an OutriderError if the verifier did not grant what the strategy needs.
        """

    @abstractmethod
    async def propose(
        self, sequences: Sequence[DraftSequence], interrupted: Callable[[], bool]
    ) -> None:
        """Guess for these sequences with `sequence.extend` and `sequence.branch`.

        The verifier can use `sequence.num_wanted` tokens of each sequence now. If the strategy
        offers nothing for a sequence, the session does not ask again before the sequence's next
        verdict, unless the strategy postpones the sequence. A long computation should call
        `interrupted` now and then, and return when that is true, because a message then waits to be
        read.
        """

    def opened(self, sequence: DraftSequence) -> None:
        """Start a sequence.

        This method and the next three run between drafts, so they must be quick.
        """

    def features(self, sequence: DraftSequence, first_position: int, rows: FeatureRows) -> None:
        """Take the features of the tokens from `first_position` on, if the strategy wants features.

        Features come before the call of `committed` for their tokens. A prompt's features come in
        parts. `rows` is bytes: the features of one token after the other, little endian, in the
        requested type. A strategy that runs in the verifier's process gets a tensor instead.
        """

    def committed(self, sequence: DraftSequence, num_valid_tokens: int) -> None:
        """Handle a verdict. Of the tokens held before, the first `num_valid_tokens` stay valid.

        The tokens held are the committed tokens and the guesses after them.
        """

    def closed(self, sequence: DraftSequence) -> None:
        """Release a sequence that ended or was abandoned, even if `opened` failed for it."""

    async def aclose(self) -> None:
        """Release the connection's state. For sequences still open, `closed` is not called."""


Guess = Callable[[Sequence[int], int], Sequence[int]]
"""Maps a text and a count to tokens that may follow the text, at most as many as the count."""


class GuessStrategy(Strategy):
    """Drafts with a function of the sequence's committed tokens and the guesses so far."""

    def __init__(self, guess: Guess, name: str) -> None:
        self.name = name
        self._guess = guess

    async def propose(
        self, sequences: Sequence[DraftSequence], interrupted: Callable[[], bool]
    ) -> None:
        """Extend each chain by the function's tokens; once interrupted, only postpone sequences."""
        for sequence in sequences:
            if interrupted():
                sequence.postpone()
            elif sequence.num_wanted > 0:
                text = [*sequence.tokens, *sequence.guesses]
                sequence.extend(self._guess(text, sequence.num_wanted))
