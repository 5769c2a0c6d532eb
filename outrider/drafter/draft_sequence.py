"""One sequence as a drafter follows it: the committed tokens, the guesses behind them, and branches beside those guesses.

All families share it. It knows tokens and the rules of the draft stream; not models, pools or streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.errors import OutriderError, Reason
from outrider.messages import Opened, Proposal, Skip, SparseDistribution, Verdict

_DECAY = 0.9
_MAX_PROPOSAL_TOKENS = 1024


@dataclass(slots=True)
class _Branch:
    tokens: list[int]
    sent: bool = False


class DraftSequence:
    """What a family is asked to guess for; `opened` says how the request samples and what its output must or may be."""

    def __init__(self, opened: Opened) -> None:
        self.opened = opened
        self.id = opened.sequence_id
        self.tokens = list(opened.token_ids)
        """Every committed token, prompt included. The list grows in place and never changes otherwise."""
        self.guesses: list[int] = []
        """The chain of guesses behind the committed tokens."""
        self.draft_tokens = opened.draft_tokens
        """Guesses that the verifier has a use for in its next step."""
        self.window = opened.window
        self.traceparent = opened.traceparent
        self.abandoned = False
        self.postponed = False
        # For the last of the guesses, which were not sent yet: what each was sampled from.
        self._unsent: list[SparseDistribution | None] = []
        # Each hangs below so many of the guesses and begins with this token.
        self._branches: dict[tuple[int, int], _Branch] = {}
        self._given_up = False
        self._branches_given_up = False
        self._skipped = False
        self._hits, self._misses = 0.0, 0.0

    @property
    def room(self) -> int:
        """How many more guesses the chain may have; 0 once the family gave it up."""
        if self._given_up or self.abandoned:
            return 0
        return max(0, min(self.window.depth - len(self.guesses), self._space))

    @property
    def branch_room(self) -> int:
        """How many more tokens branches may have; 0 with no guess to branch from or no leave to run ahead."""
        if (
            self._branches_given_up
            or self.abandoned
            or not self.guesses
            or self.window.depth <= self.draft_tokens
        ):
            return 0
        return max(0, self._space)

    @property
    def _space(self) -> int:
        held = len(self.guesses)
        if self._branches:
            held += sum([len(branch.tokens) for branch in self._branches.values()])
        return min(self.window.token_count, _MAX_PROPOSAL_TOKENS) - held

    @property
    def urgent(self) -> bool:
        """Whether the verifier may be waiting: it has too few guesses for its next step, and there is room for more."""
        return len(self.guesses) < self.draft_tokens and self.room > 0

    @property
    def goal(self) -> int:
        """How many tokens to guess now: what the verifier's next step lacks, or one such portion further ahead."""
        portion = self.draft_tokens - len(self.guesses) if self.urgent else self.draft_tokens
        return min(portion, self.room)

    @property
    def acceptance(self) -> float:
        """Probability that a guess is committed if those before it are, estimated from the verdicts so far."""
        return (self._hits + 2.0) / (self._hits + self._misses + 3.0)

    def extend(self, run: Sequence[int], distributions: Sequence[SparseDistribution] = ()) -> None:
        """Add guesses to the chain, with what each was sampled from if they were; what exceeds `room` is left out."""
        count = min(len(run), self.room)
        self.guesses += run[:count]
        self._unsent += list(distributions[:count]) or [None] * count

    def branch(self, at: int, run: Sequence[int]) -> None:
        """Guess that `run` follows the first `at` guesses instead of the others; what the window has no room for is left out.

        Nothing happens if the first token is among `guessed_at(at)`. Raises IndexError where there is no guess to differ from.
        """
        taken = self.guessed_at(at)
        tokens = list(run[: max(0, min(self.branch_room, self.window.depth - at))])
        if tokens and tokens[0] not in taken:
            self._branches[at, tokens[0]] = _Branch(tokens)

    def guessed_at(self, at: int) -> set[int]:
        """The tokens that are guessed behind the first `at` guesses, which are not all there are."""
        return {self.guesses[at], *(token for place, token in self._branches if place == at)}

    def give_up(self) -> None:
        """Extend the chain no more until the next verdict; the verifier is told, if it may be waiting."""
        self._given_up = True

    def give_up_branches(self) -> None:
        """Offer no more branches until the next verdict."""
        self._branches_given_up = True

    def postpone(self) -> None:
        """Say, before `propose` returns, that this sequence is to be asked for again even if nothing was offered."""
        self.postponed = True

    def settle(self) -> None:
        """The family was asked. Where it offered nothing it is not asked for the same again before the next verdict."""
        offered = self._unsent or any(not branch.sent for branch in self._branches.values())
        postponed, self.postponed = self.postponed, False
        if not offered and not postponed:
            self.give_up() if self.room > 0 else self.give_up_branches()

    def abandon(self) -> None:
        """Offer nothing any more, and forget what was not sent."""
        self.abandoned = True
        del self.guesses[len(self.guesses) - len(self._unsent) :]
        self._unsent, self._branches = [], {}

    def take_proposal(self) -> Proposal | None:
        """What is new since the last one, as one proposal that is complete in itself; None if nothing is."""
        new = [(at, branch) for (at, _), branch in self._branches.items() if not branch.sent]
        if not new and not self._unsent:
            return None
        tokens, count = list(self.guesses), len(self.guesses)
        parents = list(range(count)) if new else []
        for at, branch in new:
            first = len(tokens) + 1
            parents += [at, *range(first, first + len(branch.tokens) - 1)]
            tokens += branch.tokens
            branch.sent = True
        distributions: list[SparseDistribution | None] = []
        if any(given is not None for given in self._unsent):
            distributions = (
                [None] * (count - len(self._unsent)) + self._unsent + [None] * (len(tokens) - count)
            )
        self._unsent = []
        return Proposal(self.id, len(self.tokens), tokens, parents, distributions)

    def take_skip(self) -> Skip | None:
        """That no more comes, once for each committed length, if the verifier may be waiting for more; else None."""
        if self._skipped or self.room > 0 or len(self.guesses) >= self.draft_tokens:
            return None
        self._skipped = True
        return Skip(self.id, len(self.tokens))

    def follow(self, verdict: Verdict) -> int:
        """Follow a commit; how many of the tokens held before (`tokens`, then `guesses`) still stand, for caches of them.

        A verdict that says nothing new changes nothing. Raises OutriderError(PROTOCOL_VIOLATION) for one that leaves a gap.
        """
        before = len(self.tokens)
        known = before - (verdict.committed_length - len(verdict.new_token_ids))
        if known < 0:
            message = f"a verdict of sequence {self.id} leaves out {-known} tokens behind the first {before}"
            raise OutriderError(Reason.PROTOCOL_VIOLATION, message)
        held = before + len(self.guesses)
        if verdict.committed_length <= before:
            return held
        standing = self._commit(verdict.new_token_ids[known:])
        self.draft_tokens = verdict.draft_tokens
        self.window = verdict.window or self.window
        self.traceparent = verdict.traceparent
        self._given_up = self._branches_given_up = self._skipped = False
        return standing

    def _commit(self, new: list[int]) -> int:
        before, count = len(self.tokens), len(self.guesses)
        matched = 0
        while matched < min(len(new), count) and new[matched] == self.guesses[matched]:
            matched += 1
        self._hits = self._hits * _DECAY + matched
        self._misses = self._misses * _DECAY + (matched < len(new) and matched < count)
        self.tokens += new
        if matched < len(new):
            self._change_to_branch(matched, new[matched:])
            return before + matched
        del self.guesses[:matched]
        del self._unsent[: max(0, len(self._unsent) - len(self.guesses))]
        self._branches = {
            (at - matched, token): branch
            for (at, token), branch in self._branches.items()
            if at >= matched
        }
        return before + count

    def _change_to_branch(self, at: int, tokens: list[int]) -> None:
        """These tokens were committed beside the chain; what a branch guessed behind them is the chain now."""
        branch = self._branches.get((at, tokens[0]))
        if branch is None or branch.tokens[: len(tokens)] != tokens:
            branch = _Branch([])
        self.guesses = branch.tokens[len(tokens) :]
        self._unsent = [] if branch.sent else [None] * len(self.guesses)
        self._branches = {}
