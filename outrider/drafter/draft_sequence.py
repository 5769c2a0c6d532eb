"""A drafter's state of one sequence: committed tokens, the guesses behind them, and branches.

All families share it. Knows tokens and the rules of the draft stream; not models, pools or streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.errors import OutriderError, Reason
from outrider.limits import MAX_PROPOSAL_TOKENS
from outrider.messages import Opened, Proposal, Skip, SparseDistribution, Verdict

# Each verdict's weight in the acceptance estimate falls by this factor with the next verdict.
_DECAY = 0.9


@dataclass(slots=True)
class _Branch:
    """A run of guesses beside the chain, and whether a proposal has had it."""

    tokens: list[int]
    sent: bool = False


class DraftSequence:
    """The sequence that a strategy guesses for.

    `opened` has the request's sampling settings, grammar and prediction.
    """

    def __init__(self, opened: Opened) -> None:
        self.opened = opened
        self.id = opened.sequence_id
        self.tokens = list(opened.token_ids)
        """Every committed token, prompt included. The list only grows, in place."""
        self.guesses: list[int] = []
        """The chain of guesses behind the committed tokens."""
        self.draft_tokens = opened.draft_tokens
        """Guesses that the verifier can use in its next step."""
        self.window = opened.window
        self.traceparent = opened.traceparent
        self.abandoned = False
        self.postponed = False
        # The distributions of the last guesses, those that no proposal has had yet.
        self._unsent: list[SparseDistribution | None] = []
        # By the number of guesses before the branch, and its first token.
        self._branches: dict[tuple[int, int], _Branch] = {}
        self._given_up = False
        self._branches_given_up = False
        self._skipped = False
        # Decayed counts of guesses that were committed and of those that were not.
        self._hits = 0.0
        self._misses = 0.0

    @property
    def room(self) -> int:
        """How many more guesses the chain may have; 0 after `give_up` and `abandon`."""
        if self._given_up or self.abandoned:
            return 0
        return max(0, min(self.window.depth - len(self.guesses), self._space))

    @property
    def branch_room(self) -> int:
        """How many more tokens the branches may have together.

        0 where there is no guess to branch from, where the window leaves no room to run ahead of
        the next step, and after `give_up_branches` and `abandon`.
        """
        given_up = self._branches_given_up or self.abandoned
        runs_ahead = self.window.depth > self.draft_tokens
        if given_up or not self.guesses or not runs_ahead:
            return 0
        return max(0, self._space)

    @property
    def _space(self) -> int:
        """How many more tokens the window and a proposal have room for."""
        held = len(self.guesses)
        if self._branches:
            held += sum([len(branch.tokens) for branch in self._branches.values()])
        return min(self.window.token_count, MAX_PROPOSAL_TOKENS) - held

    @property
    def urgent(self) -> bool:
        """Whether the verifier may be waiting: its next step lacks guesses, and there is room."""
        return len(self.guesses) < self.draft_tokens and self.room > 0

    @property
    def goal(self) -> int:
        """How many tokens to guess now.

        As many as the verifier's next step lacks, or, when it lacks none, as many as a step takes.
        """
        wanted = self.draft_tokens
        if self.urgent:
            wanted -= len(self.guesses)
        return min(wanted, self.room)

    @property
    def acceptance(self) -> float:
        """Estimated probability that a guess is committed if those before it are."""
        return (self._hits + 2.0) / (self._hits + self._misses + 3.0)

    def extend(self, run: Sequence[int], distributions: Sequence[SparseDistribution] = ()) -> None:
        """Add the guesses of `run` to the chain; drops those beyond `room`.

        `distributions` has the distribution that each was sampled from, or is empty.
        """
        count = min(len(run), self.room)
        self.guesses += run[:count]
        self._unsent += list(distributions[:count]) or [None] * count

    def branch(self, at: int, run: Sequence[int]) -> None:
        """Guess that `run` follows the first `at` guesses; drops tokens beyond the window.

        Does nothing if `guessed_at(at)` has the run's first token. Raises IndexError if the chain
        has no guess at `at`.
        """
        taken = self.guessed_at(at)
        room = max(0, min(self.branch_room, self.window.depth - at))
        tokens = list(run[:room])
        if tokens and tokens[0] not in taken:
            self._branches[at, tokens[0]] = _Branch(tokens)

    def guessed_at(self, at: int) -> set[int]:
        """The tokens guessed behind the first `at` guesses: the chain's and the branches'."""
        branches = [token for place, token in self._branches if place == at]
        return {self.guesses[at], *branches}

    def give_up(self) -> None:
        """End the chain until the next verdict; a waiting verifier gets a skip."""
        self._given_up = True

    def give_up_branches(self) -> None:
        """Offer no more branches until the next verdict."""
        self._branches_given_up = True

    def postpone(self) -> None:
        """Have `propose` called again for this sequence, even if it offers nothing now.

        A strategy calls this before its `propose` returns.
        """
        self.postponed = True

    def settle(self) -> None:
        """Give up the chain or the branches if the strategy offered nothing.

        The session calls this after each `propose`, so that it does not ask for the same again
        before the next verdict.
        """
        offered = self._unsent or any(not branch.sent for branch in self._branches.values())
        postponed = self.postponed
        self.postponed = False
        if offered or postponed:
            return
        if self.room > 0:
            self.give_up()
        else:
            self.give_up_branches()

    def abandon(self) -> None:
        """Offer nothing from now on; drops all guesses that no proposal has had."""
        self.abandoned = True
        del self.guesses[len(self.guesses) - len(self._unsent) :]
        self._unsent = []
        self._branches = {}

    def take_proposal(self) -> Proposal | None:
        """A proposal of the chain and the new branches; None if nothing is new.

        It repeats the chain from the last committed token, so that it needs no earlier proposal.
        """
        new = [(at, branch) for (at, _), branch in self._branches.items() if not branch.sent]
        if not new and not self._unsent:
            return None
        tokens = list(self.guesses)
        count = len(tokens)
        parents: list[int] = []
        if new:
            parents += range(count)
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
        """A skip if the chain has ended and the verifier may be waiting; one for each length."""
        if self._skipped or self.room > 0 or len(self.guesses) >= self.draft_tokens:
            return None
        self._skipped = True
        return Skip(self.id, len(self.tokens))

    def follow(self, verdict: Verdict) -> int:
        """Apply a verdict, and return how many of the tokens held before it are still valid.

        The tokens held are `tokens`, then `guesses`; a strategy truncates its caches to the result.
        A repeated verdict changes nothing. Raises OutriderError(PROTOCOL_VIOLATION) for a verdict
        that leaves a gap behind the committed tokens.
        """
        before = len(self.tokens)
        known = before - (verdict.committed_length - len(verdict.new_token_ids))
        if known < 0:
            gap = f"leaves out {-known} tokens behind the first {before}"
            message = f"a verdict of sequence {self.id} {gap}"
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
        """Move the last committed token along `new`; returns the number of valid tokens."""
        before = len(self.tokens)
        count = len(self.guesses)
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
        """Continue with the branch that guessed these committed tokens, or with no guesses.

        The tokens were committed behind the first `at` guesses and differ from the chain there.
        """
        branch = self._branches.get((at, tokens[0]))
        if branch is None or branch.tokens[: len(tokens)] != tokens:
            branch = _Branch([])
        self.guesses = branch.tokens[len(tokens) :]
        self._unsent = []
        if not branch.sent:
            self._unsent = [None] * len(self.guesses)
        self._branches = {}
