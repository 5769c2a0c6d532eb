"""The speculation trie: what the protocol allows is kept, what no delay can explain is refused, late guesses are used if right."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter_svc.chain import Chain
from outrider.errors import OutriderError, Reason
from outrider.messages import Opened, Proposal, Rule, SamplingParams, Skip, SparseDistribution, Verdict, Window
from verifier_svc.trie import Fate, Hit, Trie


def trie() -> Trie:
    return Trie(Window(node_count=12, depth=6))


def run(first: int, tokens: list[int], parent: int = 0, epoch: int = 0) -> Proposal:
    return Proposal(1, epoch, parent, first, tokens)


def test_a_chain_is_the_path_and_the_root_moves_along_it() -> None:
    t = trie()
    t.add(run(1, [5, 6, 7, 8]))
    assert t.path(3).token_ids == [5, 6, 7]
    assert t.advance([5, 6]).matched == 2
    assert (t.epoch, t.root, t.path(9).token_ids) == (0, 2, [7, 8])


def test_a_chain_grows_ahead_of_the_verdict() -> None:
    t = trie()
    t.add(run(1, [5, 6]))
    t.add(run(3, [7, 8], parent=2))
    t.advance([5])
    t.add(run(5, [9], parent=4))
    assert t.path(9).token_ids == [6, 7, 8, 9]


def test_a_miss_drops_the_trie_and_raises_the_epoch() -> None:
    t = trie()
    t.add(run(1, [5, 6, 7]))
    assert t.advance([5, 9]).matched == 1
    assert (t.epoch, t.root, t.path(9).token_ids) == (1, 0, [])
    assert t.add(run(4, [8], parent=3)) is Fate.STALE
    assert t.add(run(1, [8], epoch=1)) is Fate.ADDED


def test_a_side_branch_is_kept_and_found_by_the_commit() -> None:
    t = trie()
    t.add(run(1, [5, 6, 7]))
    t.add(run(4, [9, 3], parent=1))
    assert t.advance([5, 9]).matched == 2
    assert (t.epoch, t.root, t.path(9).token_ids) == (0, 4, [3])


def test_what_hangs_under_a_branch_that_was_ruled_out_is_stale_and_keeps_the_numbering() -> None:
    t = trie()
    t.add(run(1, [5]))
    t.add(run(2, [6]))
    t.advance([6])
    assert t.add(run(3, [1, 2], parent=1)) is Fate.STALE
    assert t.add(run(5, [4], parent=2)) is Fate.ADDED
    assert t.path(9).token_ids == [4]


def test_the_path_is_what_was_proposed_first_and_siblings_are_for_when_it_fails() -> None:
    t = trie()
    t.add(run(1, [5]))
    t.add(run(2, [6, 7]))
    assert t.path(9).token_ids == [5]
    t.advance([6])
    assert t.path(9).token_ids == [7]


def test_a_skip_says_that_waiting_is_no_use() -> None:
    t = trie()
    assert not t.ready(3)
    t.add(run(1, [5]))
    t.skip(Skip(1, 0, 1))
    assert t.ready(3)
    t.advance([5])
    assert t.ready(3)
    t.advance([8])
    assert not t.ready(3)


def test_distributions_stay_with_their_tokens() -> None:
    t = trie()
    laws = [SparseDistribution(np.array([i]), np.array([1.0])) for i in (5, 6)]
    t.add(Proposal(1, 0, 0, 1, [5, 6], laws))
    t.advance([5])
    assert t.path(4).distributions == laws[1:]


def test_a_path_that_is_sampled_only_in_part_counts_as_one_hot() -> None:
    t = trie()
    t.add(Proposal(1, 0, 0, 1, [5], [SparseDistribution(np.array([5]), np.array([1.0]))]))
    t.add(run(2, [6], parent=1))
    assert t.path(4).distributions == []


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        (run(1, [5], epoch=1), "epoch"),
        (run(1, [5], parent=9), "parent_node"),
        (run(3, [5]), "first_node"),
        (run(1, [1, 2, 3, 4, 5, 6, 7]), "token_ids"),
    ],
    ids=["epoch that never was", "unknown parent", "numbers with a gap", "beyond the window"],
)
def test_what_no_delay_can_explain_is_a_violation_that_names_the_field(bad: Proposal, field: str) -> None:
    with pytest.raises(OutriderError) as caught:
        trie().add(bad)
    assert caught.value.reason is Reason.PROTOCOL_VIOLATION
    assert caught.value.field == f"proposal.{field}"


def test_too_many_nodes_are_a_violation() -> None:
    t = trie()
    t.add(run(1, [1, 2, 3, 4, 5, 6]))
    t.add(run(7, [2, 2, 3, 4, 5, 6]))
    with pytest.raises(OutriderError, match="12 nodes"):
        t.add(run(13, [3]))


def test_siblings_of_one_token_are_a_violation() -> None:
    t = trie()
    t.add(run(1, [5]))
    with pytest.raises(OutriderError, match="has that child"):
        t.add(run(2, [5]))


def test_what_is_beside_a_token_that_was_passed_is_gone() -> None:
    t = trie()
    t.add(run(1, [5, 6, 7]))
    t.add(run(4, [9, 3]))
    t.advance([5])
    assert (t.node_count, t.path(9).token_ids) == (2, [6, 7])
    assert t.add(run(6, [1], parent=4)) is Fate.STALE


def test_the_window_is_counted_from_an_outcome_that_was_taken() -> None:
    t = trie()
    t.add(run(1, [5]))
    t.add(run(2, [6, 7, 8]))
    t.add(run(5, [9, 9], parent=3))
    t.advance([6])
    assert t.add(run(7, [1, 1, 1], parent=6)) is Fate.ADDED, "which reaches the window's depth"
    with pytest.raises(OutriderError, match="reach depth 7, but the window allows 6"):
        t.add(run(10, [1], parent=9))


@given(st.data())
def test_any_growth_and_commits_leave_what_a_naive_set_of_strings_would(data: st.DataObject) -> None:
    """Model: the guesses as plain strings below the root, each node known by its number."""
    t = Trie(Window(node_count=400, depth=100))
    guesses: dict[int, tuple[int, ...]] = {0: ()}
    last = 0
    for _ in range(data.draw(st.integers(1, 12))):
        if data.draw(st.booleans()):
            parent = data.draw(st.sampled_from(sorted(guesses)))
            tokens = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
            if (*guesses[parent], tokens[0]) in guesses.values():
                continue
            t.add(Proposal(1, t.epoch, parent, last + 1, tokens))
            for i in range(len(tokens)):
                guesses[last + 1 + i] = (*guesses[parent], *tokens[: i + 1])
            last += len(tokens)
        else:
            committed = tuple(data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=3)))
            below = {n: g[len(committed) :] for n, g in guesses.items() if g[: len(committed)] == committed}
            epoch = t.epoch
            t.advance(list(committed))
            assert (t.epoch == epoch) == bool(below)
            guesses, last = (below, last) if below else ({0: ()}, 0)
        assert t.node_count == len(guesses) - 1
        favourite: tuple[int, ...] = ()
        while children := [n for n, g in guesses.items() if len(g) == len(favourite) + 1 and g[:-1] == favourite]:
            favourite = guesses[min(children)]
        assert tuple(t.path(1000).token_ids) == favourite


def test_a_guess_that_comes_after_its_tokens_were_committed_goes_on_behind_them() -> None:
    t = trie()
    assert t.advance([5]).matched == 0
    assert t.advance([6, 7]).matched == 0
    assert t.epoch == 2
    assert t.add(run(1, [5, 6, 7, 8, 9])) is Fate.ADDED
    assert t.path(9).token_ids == [8, 9]
    walk = t.advance([8])
    assert (walk.matched, walk.hit) == (1, Hit.CHAIN)
    assert (t.epoch, t.root, t.path(9).token_ids) == (3, 0, [9]), "the drafter has yet to be heard of in a later epoch"


def test_a_late_guess_that_was_wrong_says_nothing() -> None:
    t = trie()
    t.advance([5])
    t.add(run(1, [6, 7]))
    assert (t.path(9).token_ids, t.node_count, t.ready(1)) == ([], 0, False)
    t.advance([6])
    assert t.open_epochs == [1, 2]
    assert t.add(run(3, [8], parent=2)) is Fate.STALE


def test_of_late_guesses_the_branch_that_was_right_is_kept_though_the_favourite_came_first_and_was_wrong() -> None:
    t = trie()
    t.advance([5, 6, 7])
    assert t.add(run(1, [5, 8, 9])) is Fate.STALE
    assert (t.path(9).token_ids, t.node_count) == ([], 0)
    t.advance([1])
    assert t.add(run(4, [3, 3], parent=0)) is Fate.STALE, "under what is ruled out by the favourite's own first token"
    assert t.add(run(6, [6, 7, 1, 2, 4], parent=1)) is Fate.ADDED
    assert (t.path(9).token_ids, t.epoch) == ([2, 4], 2)
    walk = t.advance([2])
    assert (walk.matched, walk.hit, t.path(9).token_ids) == (1, Hit.CHAIN, [4])


def test_a_late_guess_that_is_too_short_may_still_go_on() -> None:
    t = trie()
    t.advance([5, 6])
    t.add(run(1, [5]))
    assert t.path(9).token_ids == []
    t.add(run(2, [6, 7], parent=1))
    assert t.path(9).token_ids == [7]


def test_what_is_said_in_a_later_epoch_ends_those_before() -> None:
    t = trie()
    t.advance([5])
    t.advance([6])
    t.add(run(1, [6, 7], epoch=1))
    assert t.open_epochs == [1, 2]
    assert t.add(run(1, [5, 6, 9])) is Fate.STALE
    assert t.path(9).token_ids == [7]
    t.skip(Skip(1, 2, 0))
    assert (t.open_epochs, t.path(9).token_ids, t.ready(3)) == ([2], [], True)


def test_skips_of_what_was_passed_are_not_kept() -> None:
    t = Trie(Window(node_count=12, depth=6))
    for step in range(100):
        t.add(run(1 + step, [5], parent=step))
        t.advance([5])
        t.skip(Skip(1, 0, step))
    assert not t._heard.skipped


def test_no_more_than_a_few_epochs_stay_open() -> None:
    t = trie()
    for _ in range(100):
        t.advance([5])
        assert len(t.open_epochs) <= 2 * t.window.depth + 1
    assert t.add(run(1, [5] * 3)) is Fate.STALE
    assert t.add(run(1, [5] * 6, epoch=95)) is Fate.ADDED
    assert t.path(9).token_ids == [5]
    assert t.open_epochs == [95, 96, 97, 98, 99, 100]


def test_what_came_too_late_or_twice_counts_as_wasted() -> None:
    t = trie()
    t.advance([5])
    t.add(run(1, [5, 6, 7]))
    assert t.advance([6]).wasted == 1, "a token that was committed already"
    t.add(run(1, [7, 8], epoch=2))
    assert t.advance([7]).wasted == 1, "which was there, and is proposed once more"


def test_a_skip_in_an_epoch_that_is_over_does_not_say_that_waiting_is_no_use() -> None:
    t = trie()
    t.advance([5])
    t.add(run(1, [5]))
    t.skip(Skip(1, 0, 1))
    assert not t.ready(1)
    t.skip(Skip(1, 1, 0))
    assert t.ready(1)


@given(st.data())
def test_however_late_messages_are_both_sides_agree_in_the_end(data: st.DataObject) -> None:
    """A drafter whose guesses are often right, and a verifier that commits with and without it; messages wait on the way."""
    window = Window(node_count=24, depth=6)
    t, chain = Trie(window), Chain(Opened(1, 0, [9], SamplingParams(temperature=0.0), Rule.ONE_HOT, window, depth=3))
    text, guessed = [9], {(9,)}
    up: list[Proposal] = []
    down: list[Verdict] = []

    def draft() -> None:
        proposal = chain.resend()
        if proposal is None and chain.room:
            count = min(chain.room, data.draw(st.integers(1, 4)))
            proposal = chain.grow(data.draw(st.lists(st.sampled_from([1, 1, 1, 2]), min_size=count, max_size=count)))
        if proposal is not None:
            up.append(proposal)
            guessed.add((*chain.tokens, *chain.ahead))

    def commit() -> None:
        path = t.path(3).token_ids
        new = [*path[: data.draw(st.integers(0, len(path)))], data.draw(st.sampled_from([1, 1, 1, 2]))]
        text.extend(new)
        matched = t.advance(new).matched
        down.append(Verdict(1, t.epoch, t.root, len(text), matched, new))

    for _ in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["draft", "commit", "up", "down"]))
        if action == "draft":
            draft()
        elif action == "commit":
            commit()
        elif action == "up" and up:
            t.add(up.pop(0))
        elif action == "down" and down:
            chain.apply(down.pop(0))
        foretold = (*text, *t.path(9).token_ids)
        assert not t.node_count or any(guess[: len(foretold)] == foretold for guess in guessed)
    while up or down:
        for proposal in up:
            t.add(proposal)
        up.clear()
        for verdict in down:
            chain.apply(verdict)
        down.clear()
        if (proposal := chain.resend()) is not None:
            up.append(proposal)
    assert chain.tokens == text
    assert t.path(99).token_ids == chain.ahead
