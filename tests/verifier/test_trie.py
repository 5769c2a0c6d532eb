"""The speculation trie uses guesses that agree with the commit, in any order of arrival."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import OutriderError, Reason
from outrider.protocol.draft_messages import Proposal, Skip, SparseDistribution, Window
from verifier_svc.state.trie import LookupResult, Trie

PROMPT = [1, 2, 3]


class Text:
    """A trie and the committed text beside it."""

    def __init__(self, window: Window = Window(token_count=12, depth=6)) -> None:  # noqa: B008  # frozen
        self.tokens = list(PROMPT)
        self.trie = Trie(len(self.tokens), window)

    def propose(self, tokens: list[int], base: int = 3, **fields: Any) -> tuple[int, ...]:
        """Add a proposal; return how many tokens were fresh, merged, passed, stale and cut."""
        added = self.trie.add(Proposal(1, base, tokens, **fields), self.tokens)
        return added.fresh, added.merged, added.passed, added.stale, added.cut

    def commit(self, *tokens: int) -> tuple[int, str, int]:
        """Commit tokens; return how many matched, the result, and how many guesses were wasted."""
        self.tokens += tokens
        walk = self.trie.advance(list(tokens))
        return walk.matched, walk.result.value, walk.wasted

    def skip(self, base: int) -> None:
        self.trie.skip(Skip(1, base), self.tokens)

    @property
    def path(self) -> list[int]:
        return self.trie.path(99).token_ids


def distribution(token: int) -> SparseDistribution:
    return SparseDistribution(np.array([token]), np.array([1.0]))


def test_a_proposal_that_the_commit_contradicts_is_stale() -> None:
    text = Text()
    text.commit(5, 6)
    assert text.propose([5, 8, 9]) == (0, 0, 1, 2, 0)
    assert text.propose([5]) == (0, 0, 1, 0, 0)
    assert (text.path, text.trie.node_count) == ([], 0)


def test_branches_beside_a_committed_token_are_dropped() -> None:
    text = Text()
    text.propose([5, 6, 7])
    text.propose([9, 3])
    assert text.commit(5) == (1, "chain", 2)
    assert (text.trie.node_count, text.path) == (2, [6, 7])


def test_tokens_beyond_the_window_are_cut() -> None:
    text = Text(Window(token_count=8, depth=4))
    assert text.propose([1, 2, 3, 4, 5, 6]) == (4, 0, 0, 0, 2)
    assert text.propose([9, 9, 9, 9]) == (4, 0, 0, 0, 0)
    assert text.propose([7]) == (0, 0, 0, 0, 1)
    assert (text.path, text.trie.node_count) == ([1, 2, 3, 4], 8)
    text.commit(1)
    assert text.propose([1, 2, 3, 4, 5, 6], base=3) == (1, 3, 1, 0, 1)


def test_a_skip_ends_the_wait_until_the_next_commit() -> None:
    text = Text()
    assert not text.trie.ready(3)
    text.propose([5])
    text.skip(3)
    assert text.trie.ready(3)
    text.commit(5)
    assert not text.trie.ready(3)
    text.skip(3)
    assert not text.trie.ready(3), "a skip from before the commit says nothing"
    text.skip(4)
    assert text.trie.ready(3)


def test_distributions_stay_with_their_tokens() -> None:
    text = Text()
    text.propose([5, 6], distributions=[distribution(5), distribution(6)])
    text.commit(5)
    assert [d.token_ids[0] for d in text.trie.path(4).distributions] == [6]


def test_a_repeated_token_keeps_its_first_distribution() -> None:
    text = Text()
    first = [distribution(5), distribution(6)]
    text.propose([5, 6], distributions=list(first))
    text.propose([5, 6, 7], distributions=[None, distribution(6), distribution(7)])
    path = text.trie.path(9)
    assert path.token_ids == [5, 6, 7]
    assert path.distributions[:2] == first
    assert len(path.distributions) == 3


def test_a_one_hot_token_stays_one_hot_when_repeated() -> None:
    text = Text()
    text.propose([5])
    text.propose([5, 6], distributions=[distribution(5), distribution(6)])
    assert text.trie.path(9).distributions == []


@pytest.mark.parametrize("base", [2, 0, -1, 6, 2**31 - 1])
def test_an_impossible_base_is_a_violation_that_names_its_bounds(
    base: int,
) -> None:
    text = Text()
    text.commit(5, 6)
    bounds = "from 3, as it was opened, to the 5 committed tokens"
    for send in (lambda: text.propose([5], base), lambda: text.skip(base)):
        with pytest.raises(OutriderError, match=bounds) as caught:
            send()
        assert caught.value.reason is Reason.PROTOCOL_VIOLATION
        assert caught.value.field == "base_length"


Guess = tuple[int, ...]


def naive(seen: dict[Guess, int], committed: list[int]) -> tuple[set[Guess], list[int]]:
    """Return what a trie should have after the guesses `seen` and this commit.

    `seen` maps each text that was ever guessed to its order of arrival. Returns the texts that
    continue after the commit, and the main path.
    """
    start = len(committed)
    below = {guess for guess in seen if len(guess) > start and list(guess[:start]) == committed}
    path = tuple(committed)
    while children := [guess for guess in below if guess[:-1] == path]:
        path = min(children, key=seen.__getitem__)
    return below, list(path[start:])


class World:
    """A trie and its model, under random events."""

    def __init__(self, data: st.DataObject) -> None:
        self.draw = data.draw
        self.committed = list(PROMPT)
        self.trie = Trie(len(self.committed), Window(token_count=4096, depth=128))
        self.seen: dict[Guess, int] = {}
        self.in_flight: list[Proposal] = []

    def propose(self) -> None:
        ids = self.draw(st.lists(TOKENS, min_size=1, max_size=6))
        parents: list[int] = []
        if self.draw(st.booleans()):
            parents = [self.draw(st.integers(0, i)) for i in range(len(ids))]
        base = self.draw(st.integers(self.trie._opened_length, len(self.committed)))
        self.in_flight.append(Proposal(1, base, ids, parents))

    def deliver(self) -> None:
        """Deliver a proposal, which stays in flight and may be delivered again."""
        if not self.in_flight:
            return
        proposal = self.draw(st.sampled_from(self.in_flight))
        self.trie.add(proposal, self.committed)
        texts: list[Guess] = [tuple(self.committed[: proposal.base_length])]
        for i, token in enumerate(proposal.token_ids):
            parent = proposal.parents[i] if proposal.parents else i
            texts.append((*texts[parent], token))
            self.seen.setdefault(texts[-1], len(self.seen))

    def lose(self) -> None:
        if self.in_flight:
            self.in_flight.remove(self.draw(st.sampled_from(self.in_flight)))

    def commit(self) -> None:
        new = self.draw(st.lists(TOKENS, min_size=1, max_size=3))
        self.committed += new
        walk = self.trie.advance(new)
        below, _ = naive(self.seen, self.committed)
        assert (walk.result in (LookupResult.CHAIN, LookupResult.BRANCH)) == bool(below)

    def join(self) -> None:
        """Replace the drafter by another drafter; the first drafter's guesses are gone."""
        self.trie = Trie(len(self.committed), self.trie.window)
        self.seen = {}
        self.in_flight = []


TOKENS = st.integers(0, 2)
EVENTS = (World.propose, World.propose, World.deliver, World.deliver)
RARE_EVENTS = (World.lose, World.commit, World.join)


@given(st.data())
def test_a_trie_equals_a_naive_set_of_texts_in_any_order_of_events(data: st.DataObject) -> None:
    world = World(data)
    for _ in range(data.draw(st.integers(1, 25))):
        event = data.draw(st.sampled_from((*EVENTS, *RARE_EVENTS)))
        event(world)
        below, path = naive(world.seen, world.committed)
        assert world.trie.node_count == len(below)
        assert world.trie.path(1000).token_ids == path
