"""A drafter's chain against the verifier's trie: whatever is late in either direction, both sides end up with the same guesses."""

from collections import deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter_svc.chain import Chain
from outrider.errors import OutriderError, Reason
from outrider.messages import Opened, Proposal, Rule, SamplingParams, Skip, SparseDistribution, Verdict, Window
from verifier_svc.trie import Trie

WINDOW = Window(node_count=12, depth=6)
PROMPT = [7, 7, 7]


def opened(depth: int = 4) -> Opened:
    return Opened(1, 0, list(PROMPT), SamplingParams(0.0), Rule.ONE_HOT, WINDOW, depth)


class Pair:
    """A chain and a trie, with the messages between them on their way."""

    def __init__(self) -> None:
        self.chain, self.trie = Chain(opened()), Trie(WINDOW)
        self.committed = list(PROMPT)
        self.up: deque[Proposal | Skip] = deque()
        self.down: deque[Verdict] = deque()

    def draft(self, tokens: list[int]) -> None:
        """What every family does in a round: what outlived a raised epoch goes first, then the window is filled, or given up."""
        if run := self.chain.resend():
            self.up.append(run)
        if self.chain.room > 0:
            self.up.append(self.chain.grow(tokens[: self.chain.room]) if tokens else self.chain.skip())

    def branch(self, at: int, tokens: list[int]) -> None:
        """Guess what may be committed instead of the chain's token at some place, where the window has room for it."""
        if run := self.chain.resend():
            self.up.append(run)
        fits = len(tokens) <= self.chain.side_room and at + len(tokens) <= WINDOW.depth
        if at < len(self.chain.ahead) and fits and tokens[0] not in self.chain.branches_at(at):
            self.up.append(self.chain.branch(at, tokens))

    def deliver_up(self) -> None:
        if self.up:
            message = self.up.popleft()
            self.trie.add(message) if isinstance(message, Proposal) else self.trie.skip(message)

    def commit(self, accepted: int, own: int) -> None:
        """A step accepts some of the path and adds a token of its own."""
        new = [*self.trie.path(accepted).token_ids, own]
        matched = self.trie.advance(new).matched
        self.committed += new
        self.down.append(Verdict(1, self.trie.epoch, self.trie.root, len(self.committed), matched, new))

    def deliver_down(self) -> None:
        if self.down:
            before = [*self.chain.tokens, *self.chain.ahead]
            standing = self.chain.apply(self.down.popleft())
            after = [*self.chain.tokens, *self.chain.ahead]
            assert after[:standing] == before[:standing]
            assert standing == min(len(before), len(after)) or after[standing] != before[standing]

    def settle(self) -> None:
        while self.down:
            self.deliver_down()
        if run := self.chain.resend():
            self.up.append(run)
        while self.up:
            self.deliver_up()


token = st.integers(0, 2)
actions = st.one_of(
    st.tuples(st.just("draft"), st.lists(token, max_size=4)),
    st.tuples(st.just("branch"), st.integers(0, 4), st.lists(token, min_size=1, max_size=3)),
    st.tuples(st.just("commit"), st.integers(0, 4), token),
    st.tuples(st.just("deliver_up")),
    st.tuples(st.just("deliver_down")),
)


@given(st.lists(actions, max_size=60))
def test_both_sides_agree_after_any_interleaving_and_the_protocol_is_never_broken(script: list[tuple[object, ...]]) -> None:
    pair = Pair()
    for name, *arguments in script:
        getattr(pair, str(name))(*arguments)
    pair.settle()
    assert pair.chain.tokens == pair.committed
    assert pair.chain.epoch == pair.trie.epoch
    assert pair.chain.ahead == pair.trie.path(WINDOW.depth).token_ids
    assert pair.chain.tip == (pair.trie.favourites() or [pair.trie.root])[-1]
    assert pair.chain.side_room == WINDOW.node_count - pair.trie.node_count


def test_a_hit_keeps_what_runs_ahead_and_makes_room_for_more() -> None:
    pair = Pair()
    pair.draft([1, 2, 0, 1])
    pair.draft([2, 2, 2])
    assert (pair.chain.ahead, pair.chain.room) == ([1, 2, 0, 1, 2, 2], 0)
    pair.deliver_up()
    pair.commit(accepted=2, own=0)
    pair.deliver_down()
    assert (pair.chain.ahead, pair.chain.room, pair.chain.tip) == ([1, 2, 2], 3, 6)


def test_a_miss_keeps_the_matched_part_of_the_state_alone() -> None:
    chain = Chain(opened())
    chain.grow([1, 2, 0, 1])
    assert chain.apply(Verdict(1, 1, 0, 6, 2, [1, 2, 2])) == len(PROMPT) + 2
    assert (chain.tokens, chain.ahead, chain.tip) == ([*PROMPT, 1, 2, 2], [], 0)


def test_an_outcome_that_was_foreseen_becomes_the_chain_with_no_round_trip() -> None:
    pair = Pair()
    pair.draft([1, 2, 0, 1])
    pair.up.append(pair.chain.branch(2, [2, 1, 1]))
    pair.deliver_up()
    pair.deliver_up()
    pair.commit(accepted=2, own=2)
    assert pair.trie.path(4).token_ids == [1, 1]
    pair.deliver_down()
    assert (pair.chain.ahead, pair.chain.epoch, pair.chain.tip) == ([1, 1], 0, 7)


def test_a_branch_stays_at_its_place_when_tokens_before_it_are_committed() -> None:
    pair = Pair()
    pair.draft([1, 2, 0, 1])
    pair.up.append(pair.chain.branch(2, [2, 1, 1]))
    pair.deliver_up()
    pair.deliver_up()
    pair.commit(accepted=0, own=1)
    pair.deliver_down()
    assert pair.chain.branches_at(1) == {0, 2}
    pair.commit(accepted=1, own=2)
    pair.deliver_down()
    assert (pair.chain.ahead, pair.chain.epoch) == ([1, 1], 0)


def test_of_an_outcome_what_a_verdict_of_several_tokens_committed_is_passed_over() -> None:
    """As after a pause, when what was withheld is told at once."""
    pair = Pair()
    pair.draft([1, 0])
    pair.up.append(pair.chain.branch(1, [2, 1, 0]))
    pair.deliver_up()
    pair.deliver_up()
    matched = pair.trie.advance([1, 2, 1]).matched
    pair.chain.apply(Verdict(1, pair.trie.epoch, pair.trie.root, len(PROMPT) + 3, matched, [1, 2, 1]))
    assert pair.chain.ahead == pair.trie.path(9).token_ids == [0]


def test_an_outcome_that_was_foreseen_but_came_too_late_is_offered_again() -> None:
    pair = Pair()
    pair.draft([1, 2, 0, 1])
    pair.deliver_up()
    pair.up.append(pair.chain.branch(2, [2, 1, 1]))
    pair.commit(accepted=2, own=2)
    pair.deliver_down()
    assert pair.chain.resend() == Proposal(1, epoch=1, parent_node=0, first_node=1, token_ids=[1, 1])


def test_what_was_sampled_behind_a_one_hot_outcome_is_offered_again_as_one_hot() -> None:
    """A run has a distribution for each of its tokens or for none."""
    pair = Pair()
    pair.draft([0])
    pair.up.append(pair.chain.branch(0, [2, 1]))
    pair.deliver_up()
    pair.deliver_up()
    pair.commit(accepted=0, own=2)
    pair.deliver_down()
    sure = [SparseDistribution(np.array([token]), np.array([1.0])) for token in (0, 1, 2)]
    assert pair.chain.grow([0, 1, 2], sure).distributions == sure
    for token in (1, 0):
        pair.commit(accepted=0, own=token)
        pair.deliver_down()
    assert pair.chain.resend() == Proposal(1, epoch=1, parent_node=0, first_node=1, token_ids=[1, 2], distributions=sure[1:])
    pair.chain.grow([1, 1])
    pair.commit(accepted=0, own=1)
    pair.deliver_down()
    again = pair.chain.resend()
    assert again is not None
    assert (again.token_ids, again.distributions) == ([2, 1, 1], [])


def test_guesses_that_came_too_late_but_were_right_are_offered_again() -> None:
    """The verifier decoded plainly what the drafter had guessed, so the guesses behind it still stand."""
    pair = Pair()
    pair.draft([1, 2, 0])
    pair.commit(accepted=0, own=1)
    pair.deliver_down()
    run = pair.chain.resend()
    assert run == Proposal(1, epoch=1, parent_node=0, first_node=1, token_ids=[2, 0])
    assert pair.chain.resend() is None


def test_a_skip_holds_until_the_tip_moves_or_the_epoch_rises() -> None:
    pair = Pair()
    pair.draft([1, 2])
    pair.deliver_up()
    assert pair.chain.skip() == Skip(1, 0, 2)
    assert pair.chain.room == 0
    pair.commit(accepted=1, own=2)
    pair.deliver_down()
    assert pair.chain.room == 0
    pair.commit(accepted=0, own=1)
    pair.deliver_down()
    assert pair.chain.room == WINDOW.depth


def test_a_sequence_is_urgent_while_the_verifier_has_less_than_a_step_of_it() -> None:
    chain = Chain(opened(depth=3))
    chain.grow([1, 2])
    assert chain.urgent
    chain.grow([0])
    assert not chain.urgent
    assert chain.room == 3


@pytest.mark.parametrize(
    ("verdict", "why"),
    [
        (Verdict(1, 0, 2, 5, 1, [1, 0]), "not proposed"),
        (Verdict(1, 1, 0, 9, 1, [1, 0]), "9 tokens are committed, not 5"),
    ],
)
def test_a_verdict_that_does_not_fit_is_a_protocol_violation(verdict: Verdict, why: str) -> None:
    chain = Chain(opened())
    chain.grow([1, 2])
    with pytest.raises(OutriderError, match=why) as caught:
        chain.apply(verdict)
    assert caught.value.reason is Reason.PROTOCOL_VIOLATION
