"""What the draft model keeps for a sequence, or for a branch beside its chain of guesses. Knows neither models nor torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from drafter_svc.followed_grammar import FollowedGrammar
from outrider.drafter.draft_sequence import DraftSequence
from outrider.lm.pages import KVSequence
from outrider.messages import DraftDistribution, SparseDistribution


@dataclass(eq=False, slots=True)
class CachedDraft:
    """A sequence and its cache; or a branch, with a cache and tokens of its own.

    Ids from `vocab_size` on are unknown to the target. `at` is None for the sequence itself; a branch
    hangs below so many of its guesses and begins with the first token of `run`. `foreign`: the text
    has ids that the draft model does not know.
    """

    sequence: DraftSequence
    seed: int
    vocab_size: int
    foreign: bool = False
    at: int | None = None
    run: list[int] = field(default_factory=list)
    kv: KVSequence = field(default_factory=KVSequence)
    grammar: FollowedGrammar | None = None
    committed_count: int = 0
    """Tokens that were committed when `others` and the cache were last cut."""
    others: list[list[int]] = field(default_factory=list)
    """For each of the sequence's guesses, what the draft model thought likeliest besides."""
    branches: dict[tuple[int, int], CachedDraft] = field(default_factory=dict)
    """Those of the sequence, by place and first token, until the next verdict."""
    draw_count: int = 0
    """Tokens that were sampled."""
    first: int = 0
    """How many tokens were guessed when the forwards of this round began."""
    goal: int = 0
    """How many shall be when they end."""
    stuck: bool = False
    """Whether no token may follow, so that there is nothing more to guess."""

    @property
    def guess_count(self) -> int:
        return len(self.sequence.guesses) if self.at is None else self.at + len(self.run)

    @property
    def guessed(self) -> list[int]:
        """What follows the committed tokens."""
        guesses = self.sequence.guesses
        return guesses if self.at is None else [*guesses[: self.at], *self.run]

    @property
    def length(self) -> int:
        """Tokens there are, committed and guessed."""
        return len(self.sequence.tokens) + self.guess_count

    @property
    def unread_count(self) -> int:
        """Tokens that the cache lacks."""
        return self.length - self.kv.num_computed_tokens

    @property
    def begun(self) -> bool:
        """Whether this round guessed anything yet; a branch begins with a guess."""
        return self.at is not None or self.guess_count > self.first

    @property
    def distribution(self) -> DraftDistribution:
        """How to propose; the likeliest tokens are all that greedy decoding ever takes. Branches are never sampled."""
        opened = self.sequence.opened
        if opened.sampling.greedy or (
            self.at is not None and opened.distribution is DraftDistribution.SPARSE
        ):
            return DraftDistribution.ONE_HOT
        return opened.distribution

    def begin(self) -> None:
        """Set out for what is wanted now: of a branch one token more than the verifier takes in a step."""
        self.first, self.stuck = self.guess_count, False
        if self.at is None:
            self.goal = self.first + self.sequence.goal
        else:
            self.goal = self.at + 1 + self.sequence.draft_tokens

    def unread(self, limit: int) -> list[int]:
        """The first `limit` of the tokens that the cache lacks."""
        start, committed = self.kv.num_computed_tokens, self.sequence.tokens
        if start >= len(committed):
            return self.guessed[start - len(committed) :][:limit]
        return [*committed[start : start + limit], *self.guessed][:limit]

    def append(
        self, token: int, likeliest: list[int], distribution: SparseDistribution | None = None
    ) -> None:
        """Guess one more token; `distribution` is what it was drawn from, if it was."""
        self.draw_count += distribution is not None
        if self.at is not None:
            self.run.append(token)
            return
        self.sequence.extend([token], [distribution] if distribution is not None else [])
        self.others.append([other for other in likeliest if other != token])
