"""The draft model's state for a sequence, or for a branch beside the sequence's guesses.

This module works with token ids and page tables, without a model or torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import repeat

from drafter_svc.families.vocabulary import OwnText, count_equal
from drafter_svc.grammar_state import GrammarState
from outrider.drafter.draft_sequence import DraftSequence
from outrider.lm.pages import KVSequence
from outrider.protocol.draft_messages import SparseDistribution
from outrider.protocol.messages import DraftDistribution


@dataclass(slots=True)
class Guess:
    """A guessed token, the best tokens at its position, and the distribution to send with it.

    `best` has the tokens that are likeliest to be committed there, the likeliest first. It may be
    empty. `token` is the first of `best` unless it was sampled or `best` is empty. `shares` are the
    draft model's estimates of the probabilities of `best`, or None. `distribution` is None unless
    the token was sampled from a distribution that is sent.
    """

    token: int
    best: list[int]
    distribution: SparseDistribution | None = None
    shares: list[float] | None = None

    @property
    def share(self) -> float:
        """The estimated probability of `token`; 0 if there is no estimate."""
        pairs = zip(self.best, self.shares or (), strict=False)
        return next((share for token, share in pairs if token == self.token), 0.0)

    @property
    def others(self) -> list[tuple[int, float]]:
        """The best tokens except `token`, each with its estimated probability or 0."""
        if not self.best:
            return []
        shares = self.shares or repeat(0.0)
        pairs = zip(self.best, shares, strict=False)
        return [(other, share) for other, share in pairs if other != self.token]


@dataclass(eq=False, slots=True)
class CachedDraft:
    """A sequence with its KV cache; or a branch, which has its own tokens and KV cache.

    The field `at` is None for the sequence itself. For a branch, `at` is the number of the
    sequence's guesses before the branch. The field `run` has the branch's tokens. The first of them
    is the alternative to a guess, and the draft model guesses the others. Ids from `vocab_size` on
    are unknown to the target.

    If the draft model's vocabulary is not the target's, `own_text` has the committed text as the
    draft model's tokens, from the first round on. The KV cache then holds the draft model's tokens,
    and all other fields count and hold the target's tokens. Each guess is one token in both
    vocabularies.

    The event loop and the model's thread both use this object, but never at the same time: the
    thread may touch it only between `DraftModel.grow` and the end of that round.
    """

    sequence: DraftSequence
    seed: int
    vocab_size: int
    own_text: OwnText | None = None
    has_unknown_ids: bool = False
    """True if the text has ids that the draft model does not know."""
    at: int | None = None
    run: list[int] = field(default_factory=list)
    run_shares: list[float] = field(default_factory=list)
    """The draft model's estimates of the probability of each token of `run`; 0 without an
    estimate."""
    kv: KVSequence = field(default_factory=KVSequence)
    grammar: GrammarState | None = None
    committed_count: int = 0
    """The number of committed tokens when `alternatives` and the cache were last cut."""
    alternatives: list[list[tuple[int, float]]] = field(default_factory=list)
    """For each guess of the sequence, the other best tokens, each with its probability or 0."""
    branches: dict[tuple[int, int], CachedDraft] = field(default_factory=dict)
    """The sequence's branches until the next verdict, keyed by `at` and first token."""
    draw_count: int = 0
    """Tokens sampled so far: a part of the random counter, so that no number is used twice."""
    round_start_count: int = 0
    """The number of guesses when this round began."""
    goal: int = 0
    """The number of guesses that this round should reach."""
    stuck: bool = False
    """True if no token may follow, so that there is nothing more to guess."""

    @property
    def guess_count(self) -> int:
        """The number of tokens after the committed tokens."""
        if self.at is None:
            return len(self.sequence.guesses)
        return self.at + len(self.run)

    @property
    def guessed(self) -> list[int]:
        """The tokens after the committed tokens."""
        guesses = self.sequence.guesses
        return guesses if self.at is None else [*guesses[: self.at], *self.run]

    @property
    def committed(self) -> list[int]:
        """The committed tokens that the draft model reads."""
        return self.sequence.tokens if self.own_text is None else self.own_text.ids

    @property
    def place(self) -> int:
        """The position of the next token among the target's tokens."""
        return len(self.sequence.tokens) + self.guess_count

    @property
    def length(self) -> int:
        """The number of committed and guessed tokens of the draft model."""
        return len(self.committed) + self.guess_count

    @property
    def unread_count(self) -> int:
        """The number of tokens that are not in the KV cache yet."""
        return self.length - self.kv.num_computed_tokens

    @property
    def begun(self) -> bool:
        """True if this round has guessed a token. A branch begins with a guessed token."""
        return self.at is not None or self.guess_count > self.round_start_count

    @property
    def distribution(self) -> DraftDistribution:
        """How tokens are chosen: as the verifier asked, or ONE_HOT (take the likeliest token).

        Greedy requests need only the likeliest token. A branch never uses SPARSE.
        """
        opened = self.sequence.opened
        if opened.sampling.greedy:
            return DraftDistribution.ONE_HOT
        if self.at is not None and opened.distribution is DraftDistribution.SPARSE:
            return DraftDistribution.ONE_HOT
        return opened.distribution

    def follow(self, before: int, held: list[int]) -> int:
        """Apply a commit; return how many of the draft model's tokens are still right.

        The KV cache may hold the first `before` tokens, which were committed earlier, and the
        tokens `held` after them.
        """
        tokens, guesses = self.sequence.tokens, self.sequence.guesses
        if self.own_text is not None:
            return self.own_text.follow(tokens, held, guesses)
        return before + count_equal(held, [*tokens[before:], *guesses])

    def begin(self) -> None:
        """Start a round: set `goal` to the number of guesses that the verifier can use now.

        A branch needs one token more than the verifier takes in a step, because the branch is used
        only after its first token was committed.
        """
        self.stuck = False
        self.round_start_count = self.guess_count
        if self.at is None:
            self.goal = self.guess_count + self.sequence.num_wanted
        else:
            self.goal = self.at + 1 + self.sequence.draft_tokens

    def unread(self, limit: int) -> list[int]:
        """Return the first `limit` of the draft model's tokens that are not in the KV cache yet."""
        start = self.kv.num_computed_tokens
        committed = self.committed
        guessed = self.guessed
        if self.own_text is not None:
            guessed = self.own_text.of_guesses(guessed)
        if start >= len(committed):
            return guessed[start - len(committed) :][:limit]
        return [*committed[start : start + limit], *guessed][:limit]

    def extend(self, guesses: Sequence[Guess]) -> None:
        """Add guesses. All or none of them have a distribution, and all or none have `shares`."""
        tokens = [guess.token for guess in guesses]
        distributions = [guess.distribution for guess in guesses if guess.distribution is not None]
        self.draw_count += len(distributions)
        shares = [guess.share for guess in guesses if guess.shares]
        if self.at is not None:
            self.run += tokens
            self.run_shares += shares or [0.0] * len(tokens)
            return
        self.sequence.extend(tokens, distributions, shares)
        self.alternatives += [guess.others for guess in guesses]
