"""A drafter's sequence has the committed tokens and the guesses that agree with them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.drafter.draft_sequence import DraftSequence
from outrider.errors import OutriderError, Reason
from outrider.protocol.draft_messages import (
    DraftBatch,
    Proposal,
    Skip,
    SparseDistribution,
    Verdict,
    Window,
)
from outrider.protocol.wire.drafts import drafts_from_proto, drafts_to_proto
from tests.family_rig import opened_sequence

WINDOW = Window(token_count=12, depth=6)
PROMPT = [7, 7, 7]


def sequence(draft_tokens: int = 4, window: Window = WINDOW) -> DraftSequence:
    return DraftSequence(opened_sequence(1, PROMPT, window, draft_tokens))


def verdict(length: int, *new: int, draft_tokens: int = 4, window: Window | None = None) -> Verdict:
    return Verdict(1, length, list(new), 0, draft_tokens, window)


def sure(token: int) -> SparseDistribution:
    return SparseDistribution(np.array([token]), np.array([1.0]))


class Model:
    """A reference that keeps the whole path to every guess, in order of arrival."""

    def __init__(self) -> None:
        self.tokens = list(PROMPT)
        self.chain: tuple[int, ...] = ()
        self.paths: list[tuple[int, ...]] = []

    def extend(self, run: list[int]) -> None:
        self._add(self.chain, run)
        self.chain += tuple(run)

    def branch(self, at: int, run: list[int]) -> None:
        known = self.chain + tuple(run)
        if known[: len(self.chain)] != (self.chain[:at] + tuple(run))[: len(self.chain)]:
            self._add(self.chain[:at], run)

    def _add(self, before: tuple[int, ...], run: list[int]) -> None:
        for token in run:
            before = (*before, token)
            if before not in self.paths:
                self.paths.append(before)

    def follow(self, committed: list[int]) -> None:
        new = tuple(committed[len(self.tokens) :])
        count = len(new)
        self.tokens += new
        self.paths = [
            path[count:] for path in self.paths if len(path) > count and path[:count] == new
        ]
        kept = self.chain[:count] == new
        self.chain = self.chain[count:] if kept else self._main_path()

    def _main_path(self) -> tuple[int, ...]:
        """Return the path along the guesses that arrived first."""
        path: tuple[int, ...] = ()
        while behind := [one for one in self.paths if one[:-1] == path]:
            path = behind[0]
        return path


token = st.integers(0, 2)
actions = st.one_of(
    st.tuples(st.just("extend"), st.lists(token, max_size=4)),
    st.tuples(st.just("branch"), st.integers(0, 4), st.lists(token, min_size=1, max_size=3)),
    st.tuples(st.just("commit"), st.integers(0, 4), st.lists(token, max_size=2)),
    st.tuples(st.just("deliver"), st.integers(0, 8), st.integers(0, 6)),
    st.tuples(st.just("take")),
)


class Pair:
    """A sequence, its reference and the verifier's committed tokens.

    Verdicts carry the tokens to the sequence and the reference in any portions, with repeats.
    """

    def __init__(self) -> None:
        self.real = sequence()
        self.model = Model()
        self.committed = list(PROMPT)
        self.proposals: list[Proposal] = []

    def extend(self, run: list[int]) -> None:
        self.model.extend(run[: self.real.remaining_window])
        self.real.extend(run)

    def branch(self, at: int, run: list[int]) -> None:
        room = min(self.real.branch_room, WINDOW.depth - at)
        if at < len(self.real.guesses) and len(run) <= room:
            self.model.branch(at, run)
            self.real.branch(at, run)

    def commit(self, accepted: int, own: list[int]) -> None:
        """Commit `accepted` guesses, if the drafter has all committed tokens; then commit `own`."""
        if self.committed == self.real.tokens:
            self.committed += self.real.guesses[:accepted]
        self.committed += own

    def deliver(self, earlier: int, later: int) -> None:
        """Deliver a verdict that begins `earlier` tokens before the end of the drafter's text.

        The verdict ends `later` - 2 tokens after the text's end, or at the last committed token if
        that is earlier. If `later` is at most 2, the verdict only repeats tokens.
        """
        start = max(0, len(self.real.tokens) - earlier)
        end = min(len(self.committed), len(self.real.tokens) + later - 2)
        if start > end:
            return
        before = [*self.real.tokens, *self.real.guesses]
        num_valid_tokens = self.real.advance_or_rewind(verdict(end, *self.committed[start:end]))
        after = [*self.real.tokens, *self.real.guesses]
        assert after[:num_valid_tokens] == before[:num_valid_tokens]
        assert (
            num_valid_tokens == min(len(before), len(after))
            or after[num_valid_tokens] != before[num_valid_tokens]
        )
        self.model.follow(self.committed[:end])

    def take(self) -> None:
        """Take a proposal; check that it is valid, and has all new guesses and their parents."""
        unsent = set(self.model.paths) - self.sent()
        proposal = self.real.take_proposal()
        if proposal is None:
            assert not unsent
            return
        assert unsent, "nothing is sent twice without something new"
        drafts_from_proto(drafts_to_proto(DraftBatch([proposal])), 4096)
        assert proposal.base_length == len(self.real.tokens)
        self.proposals.append(proposal)
        assert unsent <= self.sent()
        assert self.real.take_proposal() is None

    def sent(self) -> set[tuple[int, ...]]:
        """Return the proposed paths after the committed tokens, as in the verifier's trie."""
        found: set[tuple[int, ...]] = set()
        for proposal in self.proposals:
            behind = self.real.tokens[proposal.base_length :]
            paths: list[list[int]] = [[]]
            parents = proposal.parents or range(len(proposal.token_ids))
            for guess, parent in zip(proposal.token_ids, parents, strict=True):
                paths.append([*paths[parent], guess])
            found |= {tuple(path[len(behind) :]) for path in paths if path[: len(behind)] == behind}
        return found


@given(st.lists(actions, max_size=60))
def test_it_agrees_with_a_reference_after_any_messages(
    script: list[tuple[object, ...]],
) -> None:
    pair = Pair()
    for name, *arguments in script:
        getattr(pair, str(name))(*arguments)
        assert pair.real.tokens == pair.model.tokens
        assert tuple(pair.real.guesses) == pair.model.chain
    pair.take()


def test_a_branch_keeps_its_place_when_tokens_before_it_are_committed() -> None:
    drafted = sequence()
    drafted.extend([1, 2, 0, 1])
    drafted.branch(2, [2, 1, 1])
    drafted.advance_or_rewind(verdict(4, 1))
    assert drafted.guessed_at(1) == {0, 2}
    drafted.advance_or_rewind(verdict(6, 2, 2))
    assert drafted.guesses == [1, 1]


def sent_ids(proposal: Proposal | None) -> list[list[int] | None]:
    """Return the token ids of each distribution of a proposal; None where a token has none."""
    assert proposal is not None
    return [None if given is None else given.token_ids.tolist() for given in proposal.distributions]


def test_a_distribution_is_sent_once_and_omitted_in_repeats() -> None:
    drafted = sequence(draft_tokens=2)
    drafted.extend([0, 1], [sure(0), sure(1)])
    drafted.branch(0, [2, 1])
    first = drafted.take_proposal()
    assert first is not None
    assert (first.token_ids, first.parents) == ([0, 1, 2, 1], [0, 1, 0, 3])
    assert sent_ids(first) == [[0], [1], None, None]
    drafted.extend([2], [sure(2)])
    assert sent_ids(drafted.take_proposal()) == [None, None, [2]]
    drafted.advance_or_rewind(verdict(4, 2))
    drafted.extend([0], [sure(0)])
    third = drafted.take_proposal()
    assert third is not None
    assert third.token_ids == [1, 0]
    assert sent_ids(third) == [None, [0]]


def test_a_committed_unsent_token_drops_its_distribution() -> None:
    drafted = sequence()
    drafted.extend([0, 1], [sure(0), sure(1)])
    drafted.advance_or_rewind(verdict(4, 0))
    assert sent_ids(drafted.take_proposal()) == [[1]]


def test_a_skip_is_sent_once_for_each_committed_length() -> None:
    drafted = sequence(draft_tokens=2)
    assert drafted.take_skip() is None
    drafted.extend([1])
    drafted.give_up()
    assert drafted.remaining_window == 0
    assert drafted.take_skip() == Skip(1, 3)
    assert drafted.take_skip() is None
    drafted.advance_or_rewind(verdict(4, 1, draft_tokens=2))
    assert drafted.remaining_window == WINDOW.depth
    drafted.extend([1, 2])
    drafted.give_up()
    assert drafted.take_skip() is None


def test_a_repeated_verdict_changes_nothing() -> None:
    drafted = sequence(draft_tokens=2)
    drafted.advance_or_rewind(verdict(4, 1, draft_tokens=2))
    drafted.give_up()
    assert drafted.take_skip() == Skip(1, 4)
    drafted.advance_or_rewind(verdict(4, 1, draft_tokens=3, window=Window(9, 9)))
    assert drafted.remaining_window == 0
    assert (drafted.draft_tokens, drafted.window) == (2, WINDOW)
    assert drafted.take_skip() is None


def test_guesses_stay_within_a_smaller_window_and_one_proposal() -> None:
    drafted = sequence()
    drafted.extend([1, 2, 0, 1])
    drafted.advance_or_rewind(verdict(4, 1, draft_tokens=1, window=Window(2, 2)))
    assert (drafted.remaining_window, drafted.branch_room, drafted.num_wanted) == (0, 0, 0)
    wide = sequence(window=Window(4096, 128))
    wide.extend([1] * 128)
    for at in range(12):
        wide.branch(at, [2] * 128)
    proposal = wide.take_proposal()
    assert proposal is not None
    assert len(proposal.token_ids) == 1024
    drafts_from_proto(drafts_to_proto(DraftBatch([proposal])), 4096)


def test_a_sequence_is_urgent_until_it_has_the_next_steps_tokens() -> None:
    drafted = sequence(draft_tokens=3)
    drafted.extend([1, 2])
    assert (drafted.urgent, drafted.num_wanted) == (True, 1)
    drafted.extend([0])
    assert (drafted.urgent, drafted.num_wanted, drafted.remaining_window) == (False, 3, 3)


def test_branches_need_guesses_and_leave_to_run_ahead() -> None:
    drafted = sequence()
    assert drafted.branch_room == 0
    drafted.extend([1])
    assert drafted.branch_room == WINDOW.token_count - 1
    drafted.give_up_branches()
    assert (drafted.branch_room, drafted.remaining_window) == (0, WINDOW.depth - 1)
    bound = sequence(window=Window(12, 4))
    bound.extend([1])
    assert bound.branch_room == 0


def test_acceptance_is_learned_from_commits() -> None:
    drafted = sequence()
    before = drafted.acceptance
    drafted.extend([1, 2, 0])
    drafted.advance_or_rewind(verdict(6, 1, 2, 0))
    good = drafted.acceptance
    drafted.extend([1])
    drafted.advance_or_rewind(verdict(7, 2))
    assert good > before
    assert drafted.acceptance < good


@pytest.mark.parametrize("gap", [verdict(5, 1), verdict(99, 1, 2), verdict(4)])
def test_a_verdict_that_leaves_a_gap_is_a_protocol_violation(gap: Verdict) -> None:
    drafted = sequence()
    drafted.extend([1, 2])
    with pytest.raises(OutriderError, match="leaves out") as caught:
        drafted.advance_or_rewind(gap)
    assert caught.value.reason is Reason.PROTOCOL_VIOLATION
    assert drafted.tokens == PROMPT
