"""A drafter's state for one sequence: committed tokens, and the tree of guesses after them.

All families use this class. This module works with tokens and the rules of the draft stream, not
with models, pools or streams.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.drafter.guess_tree import GuessTree
from outrider.errors import OutriderError, Reason
from outrider.protocol.draft_messages import Opened, Proposal, Skip, SparseDistribution, Verdict
from outrider.protocol.limits import MAX_PROPOSAL_TOKENS


class DraftSequence:
    """The sequence that a strategy guesses for.

    `opened` has the request's sampling settings, grammar and prediction.
    """

    def __init__(self, opened: Opened) -> None:
        self.opened = opened
        self.id = opened.sequence_id
        self.tokens = list(opened.token_ids)
        """Every committed token, prompt included. The list only grows, in place."""
        self.draft_tokens = opened.draft_tokens
        """The number of the chain's guesses that the verifier can use in its next step."""
        self.tree_tokens = opened.tree_tokens
        """The number of guesses, in chain and branches, that are worth sending for a step."""
        self.window = opened.window
        self.traceparent = opened.traceparent
        self.abandoned = False
        self.postponed = False
        self._tree = GuessTree()
        self._given_up = False
        self._branches_given_up = False
        self._skipped = False

    @property
    def guesses(self) -> list[int]:
        """The chain of guesses after the committed tokens."""
        return self._tree.chain

    @property
    def confidences(self) -> list[float]:
        """The confidence of each of `guesses`; 0 where the strategy gave no confidence."""
        return self._tree.confidences

    @property
    def remaining_window(self) -> int:
        """The number of guesses by which the chain may grow; 0 after `give_up` and `abandon`."""
        if self._given_up or self.abandoned:
            return 0
        return max(0, min(self.window.depth - len(self.guesses), self._space))

    @property
    def wants_tree(self) -> bool:
        """True if the verifier's next step can verify guesses beside the chain."""
        return self.tree_tokens > self.draft_tokens > 0

    @property
    def tree_room(self) -> int:
        """The number of further branch tokens that the verifier's coming steps can verify.

        The chain may have guesses for several steps, and each step can use `tree_tokens`. The
        number is 0 if the verifier verifies only chains, and wherever `branch_room` is 0.
        """
        count = len(self._tree.chain)
        if not self.wants_tree or count == 0 or self._no_branches:
            return 0
        steps = -(-count // self.draft_tokens)
        most = min(steps * self.tree_tokens, self.window.token_count, MAX_PROPOSAL_TOKENS)
        return max(0, most - count - self._tree.branch_count)

    @property
    def branch_room(self) -> int:
        """The number of tokens by which all branches together may grow.

        Where the window lets the drafter run ahead of the next step, this is the window's room for
        branches; else `tree_room`. The room is 0 where there is no guess to branch from, and after
        `give_up_branches` and `abandon`.
        """
        if self.window.depth <= self.draft_tokens:
            return self.tree_room
        return 0 if self._no_branches or not self.guesses else max(0, self._space)

    @property
    def _no_branches(self) -> bool:
        return self._branches_given_up or self.abandoned

    @property
    def _space(self) -> int:
        """The number of further tokens for which both the window and a proposal have room."""
        held = len(self.guesses) + self._tree.branch_count
        return min(self.window.token_count, MAX_PROPOSAL_TOKENS) - held

    @property
    def urgent(self) -> bool:
        """True if the verifier may be waiting: its next step lacks guesses, and there is room."""
        return len(self.guesses) < self.draft_tokens and self.remaining_window > 0

    @property
    def num_wanted(self) -> int:
        """The number of tokens to guess now.

        If the verifier's next step lacks guesses, `num_wanted` is the number that it lacks; else it
        is the number of guesses that a step takes. It is never more than `remaining_window`.
        """
        wanted = self.draft_tokens
        if self.urgent:
            wanted -= len(self.guesses)
        return min(wanted, self.remaining_window)

    @property
    def acceptance(self) -> float:
        """The estimated probability that a guess is committed if all guesses before it are."""
        return self._tree.acceptance

    def extend(
        self,
        run: Sequence[int],
        distributions: Sequence[SparseDistribution] = (),
        confidences: Sequence[float] = (),
    ) -> None:
        """Add the guesses of `run` to the chain; drop guesses beyond `remaining_window`.

        `distributions` has the distribution that each guess was sampled from, or is empty.
        `confidences` is empty, or has the strategy's estimate for each guess: the probability that
        the guess is committed if the guess before it is committed.
        """
        count = min(len(run), self.remaining_window)
        self._tree.extend(run[:count], distributions[:count], confidences[:count])

    def branch(self, at: int, run: Sequence[int], confidences: Sequence[float] = ()) -> None:
        """Guess that `run` follows the chain's first `at` guesses; drop tokens beyond the window.

        Where `run` agrees with the chain or another branch, the tokens merge. Raises IndexError if
        the chain has no guess at `at`.
        """
        depth = max(0, self.window.depth - at)
        self._tree.branch(at, run[:depth], confidences, self.branch_room)

    def guessed_at(self, at: int) -> set[int]:
        """Return the tokens guessed right after the first `at` guesses, in chain and branches."""
        return self._tree.first_tokens(at)

    def has_guess_after(self, at: int, token: int) -> bool:
        """True if the branch that begins with `token` after `at` guesses has a second token."""
        return self._tree.has_guess_after(at, token)

    def give_up(self) -> None:
        """End the chain until the next verdict; a waiting verifier gets a skip."""
        self._given_up = True

    def give_up_branches(self) -> None:
        """Offer no more branches until the next verdict."""
        self._branches_given_up = True

    def postpone(self) -> None:
        """Have `propose` called again for this sequence, even if the present call offers nothing.

        A strategy calls this in `propose`.
        """
        self.postponed = True

    def resolve(self) -> None:
        """Give up the chain or the branches if the strategy offered nothing.

        The session calls this after each `propose`, so that the session does not go on asking
        before the next verdict.
        """
        postponed = self.postponed
        self.postponed = False
        if self._tree.has_unsent or postponed:
            return
        if self.remaining_window > 0:
            self.give_up()
        else:
            self.give_up_branches()

    def abandon(self) -> None:
        """Offer nothing from now on; drop all branches, and unsent guesses of the chain."""
        self.abandoned = True
        self._tree.drop_unsent()

    def take_proposal(self) -> Proposal | None:
        """Return a proposal of the chain and the new branches; None if nothing is new.

        The proposal repeats the chain from the last committed token, so that it needs no earlier
        proposal. If only some guesses have a confidence, the others get an estimate: `acceptance`
        for a main guess, and half of `1 - acceptance` for a guess beside a main guess.
        """
        return self._tree.take(self.id, len(self.tokens))

    def take_skip(self) -> Skip | None:
        """Return a skip if the chain has ended and the verifier may be waiting, else None.

        There is at most one skip for each committed length.
        """
        if self._skipped or self.remaining_window > 0 or len(self.guesses) >= self.draft_tokens:
            return None
        self._skipped = True
        return Skip(self.id, len(self.tokens))

    def advance_or_rewind(self, verdict: Verdict) -> int:
        """Apply a verdict, and return how many of the earlier tokens and guesses are still valid.

        The result counts `tokens`, then `guesses`; a strategy truncates its caches to the result.
        A repeated verdict changes nothing. Raises OutriderError(PROTOCOL_VIOLATION) for a verdict
        that leaves a gap after the committed tokens.
        """
        before = len(self.tokens)
        known = before - (verdict.committed_length - len(verdict.new_token_ids))
        if known < 0:
            gap = f"leaves out {-known} tokens after the first {before}"
            message = f"a verdict of sequence {self.id} {gap}"
            raise OutriderError(Reason.PROTOCOL_VIOLATION, message)
        held = before + len(self.guesses)
        if verdict.committed_length <= before:
            return held
        new = verdict.new_token_ids[known:]
        matched = self._tree.commit(new)
        self.tokens += new
        self.draft_tokens = verdict.draft_tokens
        self.tree_tokens = verdict.tree_tokens
        self.window = verdict.window or self.window
        self.traceparent = verdict.traceparent
        self._given_up = self._branches_given_up = self._skipped = False
        return before + matched if matched < len(new) else held
