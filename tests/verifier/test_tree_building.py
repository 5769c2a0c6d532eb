"""Trees of draft tokens, chosen from all drafters' tries, the likeliest tokens first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.protocol.draft_messages import Proposal
from outrider.protocol.draft_tokens_policy import DraftTokensPolicy
from outrider.protocol.messages import DraftDistribution, SamplingParams, TokenRequest
from outrider.protocol.token_tree import MAX_TREE_TOKENS
from tests.random_trees import random_tree
from tests.tree_paths import path_to
from tests.verifier.fake_model import GREEDY, VOCAB, Client, ScriptedDrafter, make_engine
from verifier_svc.engine.config import EngineConfig
from verifier_svc.engine.loop import Engine
from verifier_svc.policy.draft_policy import EVERY_DRAFT
from verifier_svc.policy.draft_trees import best_chain, grow_trees
from verifier_svc.policy.plan import Plan
from verifier_svc.state.acceptance_rate import AcceptanceRate, SiblingRates
from verifier_svc.state.merged_tries import guesses_after, observe_siblings, probs, roots
from verifier_svc.state.sequence import Assignment, Sequence
from verifier_svc.state.trie import DraftTree

LIMITS = EngineConfig(DraftTokensPolicy(), draft_trees=True)
ALL = [(1000, 0.0)]
Costs = list[tuple[int, float]]


class Rig:
    """An engine with decoding sequences, and drafters with an acceptance rate each."""

    def __init__(self, *rates: float, sequences: int = 1, **options: object) -> None:
        trust = bool(options.pop("trust", False))
        self.engine, _ = make_engine(config=LIMITS, eos_bias=-99, page_count=256, trust=trust)
        self.drafters = [
            ScriptedDrafter(self.engine, f"d{i}", f"d{i}", **options) for i in range(len(rates))
        ]
        request = TokenRequest([1, 2], 50, GREEDY if not trust else SamplingParams())
        self.sequences = [self.engine.submit(request, Client()) for _ in range(sequences)]
        self.engine.step()
        for sequence in self.sequences:
            for rate, assignment in zip(rates, sequence.assignments.values(), strict=True):
                assignment.rate = AcceptanceRate(rate, 8)

    def propose(self, tree: DraftTree, drafter: int = 0, sequence: int = 0) -> None:
        """Send a tree after the committed tokens."""
        target = self.sequences[sequence]
        base = len(target.tokens)
        proposal = Proposal(target.id, base, tree.token_ids, tree.parents)
        if tree.token_ids:
            self.drafters[drafter].send(proposal)

    def grow(
        self, depth: int = 8, costs: Costs = ALL, room: int = 1000, **plan: object
    ) -> list[DraftTree]:
        """Return the drafts that pay at these costs.

        Sequences that cannot use trees get only a chain.
        """
        depths = {sequence.id: depth for sequence in self.sequences}
        plan = {"draft_tokens": depths, "token_costs": costs, **plan}
        found = grow_trees(lambda: self.sequences, Plan(**plan), lambda: room)
        return [
            (found.get(sequence.id) or best_chain(sequence, depth))[1]
            for sequence in self.sequences
        ]

    def assignment(self, drafter: int = 0, sequence: int = 0) -> Assignment:
        return self.sequences[sequence].assignments[f"d{drafter}"]


Path = tuple[int, ...]


def paths(tree: DraftTree) -> list[Path]:
    """Return the tokens from the root to each draft token of a tree."""
    parents = tree.parents or list(range(len(tree.token_ids)))
    rows = [path_to(row, parents) for row in range(1, len(parents) + 1)]
    return [tuple(tree.token_ids[at - 1] for at in each) for each in rows]


def cumulative_values(sequence: Sequence, first: Assignment, depth: int) -> dict[Path, float]:
    """Return the cumulative acceptance of a sequence's guesses down to `depth`, keyed by path."""
    found: dict[Path, float] = {}
    pending = [((), 1.0, roots(sequence, first))]
    while pending:
        path, cumulative, nodes = pending.pop()
        guesses = guesses_after(nodes) if len(path) < depth else []
        estimates = probs(guesses, len(path)) if guesses else []
        for guess, prob in zip(guesses, estimates, strict=True):
            below = (*path, guess.token)
            found[below] = cumulative * prob
            pending.append((below, cumulative * prob, guess.nodes))
    return found


def connected(known: Mapping[Path, float]) -> Iterator[tuple[Path, ...]]:
    """Yield all sets of guesses that have each guess's parent too."""
    for count in range(len(known) + 1):
        for chosen in combinations(known, count):
            if all(len(path) == 1 or path[:-1] in chosen for path in chosen):
                yield chosen


def cost(count: int, costs: Costs) -> float:
    """Return the cost of a forward with `count` draft tokens, in tokens."""
    total = 0.0
    for i in range(count):
        total += next((cost for end, cost in costs if i < end), costs[-1][1])
    return total


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=60)
def test_no_other_set_of_guesses_gains_more_at_the_same_prices(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rig = Rig(*rng.uniform(0.2, 0.9, size=2))
    for drafter in range(2):
        rig.propose(random_tree(rng, int(rng.integers(1, 6)), 3), drafter)
    rises = np.sort(rng.uniform(0.01, 0.6, size=3))
    costs = [(2, rises[0]), (5, rises[1]), (9, rises[2])]
    [tree] = rig.grow(depth=4, costs=costs)
    [sequence] = rig.sequences
    first, _ = best_chain(sequence, 4)
    assert first is not None
    known = cumulative_values(sequence, first, 4)

    def gain(chosen: tuple[Path, ...]) -> float:
        return sum(known[path] for path in chosen) - cost(len(chosen), costs)

    # A tree that is a chain is as long as the plan says, whatever it costs.
    if len(known) > max(map(len, known)):
        best = max(gain(chosen) for chosen in connected(known))
        assert gain(tuple(paths(tree))) == pytest.approx(best)


@given(seed=st.integers(0, 2**32 - 1), depth=st.integers(1, 9), most=st.integers(1, 40))
@settings(max_examples=80)
def test_a_tree_is_depth_first_and_its_main_guesses_come_first(
    seed: int, depth: int, most: int
) -> None:
    rng = np.random.default_rng(seed)
    rig = Rig(*rng.uniform(0.2, 0.9, size=3))
    for drafter in range(3):
        rig.propose(random_tree(rng, int(rng.integers(0, 30)), VOCAB - 1), drafter)
    [tree] = rig.grow(depth=depth, costs=[(most, 0.0), (1000, 1.1)])
    [sequence] = rig.sequences
    chosen = paths(tree)
    assert len(set(chosen)) == len(chosen) <= max(most, depth)
    assert max(map(len, chosen), default=0) <= depth
    # Each token follows its parent, or another token below that parent.
    for before, path in pairwise(chosen):
        assert path[:-1] == before[: len(path) - 1]
    first, chain = best_chain(sequence, depth)
    if first is not None:
        main_path = [path for path in chosen if path == tuple(chain.token_ids[: len(path)])]
        assert main_path == chosen[: len(main_path)]
        known = cumulative_values(sequence, first, depth)
        assert set(chosen) <= set(known)
        for path, owner in zip(chosen, tree.drafter_ids, strict=False):
            assert path in held(sequence.assignments[owner])


def held(assignment: Assignment) -> list[Path]:
    """Return all paths of a trie."""
    found: list[Path] = []
    pending = [((), assignment.trie.root)]
    while pending:
        path, node = pending.pop()
        for child in node.children.values():
            found.append((*path, child.token))
            pending.append((found[-1], child))
    return found


def test_sequences_compete_for_the_cheap_places_of_a_forward() -> None:
    rig = Rig(0.8, sequences=2)
    for assignment, rate in ((rig.assignment(), 0.9), (rig.assignment(sequence=1), 0.4)):
        assignment.rate = AcceptanceRate(rate, 8)
    for sequence in range(2):
        rig.propose(DraftTree([3, 4, 5, 6], [], [0, 1, 0, 3]), sequence=sequence)
    sizes = [
        [len(tree.token_ids) for tree in rig.grow(costs=[(count, 0.01), (1000, 2.0)])]
        for count in (2, 4, 5, 8)
    ]
    # The tokens' cumulative acceptance is 0.9, 0.81, 0.05 and 0.045 for the first sequence, and
    # 0.4, 0.3, 0.16 and 0.12 for the second.
    assert sizes == [[2, 0], [2, 2], [2, 3], [4, 4]]


def test_a_draft_has_no_more_tokens_than_a_word_has_bits() -> None:
    rig = Rig(0.9)
    chains = [(token, place) for token in range(VOCAB) for place in range(11)]
    parents = [i if place else 0 for i, (_, place) in enumerate(chains)]
    rig.propose(DraftTree([token for token, _ in chains], [], parents))
    assert rig.assignment().trie.node_count > MAX_TREE_TOKENS
    [tree] = rig.grow(depth=64)
    assert len(tree.token_ids) == MAX_TREE_TOKENS


def confident(engine: Engine, drafter: ScriptedDrafter, sequence: Sequence, share: float) -> None:
    proposal = Proposal(sequence.id, len(sequence.tokens), [3, 4], [0, 0])
    proposal.confidences = [0.5, share]
    drafter.send(proposal)


def test_a_drafters_confidence_decides_about_a_guess_at_its_side() -> None:
    sizes = []
    for share in (0.02, 0.4):
        rig = Rig(0.6)
        confident(rig.engine, rig.drafters[0], rig.sequences[0], share)
        sizes.append([len(tree.token_ids) for tree in rig.grow(costs=[(9, 0.1)])])
    assert sizes == [[1], [2]]


def test_claims_that_the_commits_contradict_lose_their_weight() -> None:
    rates = SiblingRates()
    for i in range(400):
        rates.observe(0, 1, 0.4, i % 10 == 0)
    assert rates.estimate(0, 1, 0.4) == pytest.approx(0.1, abs=0.03)
    assert rates.estimate(0, 1, 0.2) == pytest.approx(0.05, abs=0.015)
    # Other ranks and depths have separate measurements, but all great depths share one.
    assert rates.estimate(0, 2, 0.4) == rates.estimate(1, 1, 0.4) == 0.4
    rates.observe(9, 1, 0.4, True)
    assert rates.estimate(3, 1, 0.4) > 0.4


def test_a_main_guess_is_rescued_by_an_own_guess_that_is_worth_its_price() -> None:
    for other, threshold, rescues in ((0, 0.1, True), (0, 0.6, False), (1, 0.1, False)):
        rig = Rig(0.5, 0.4)
        rig.propose(DraftTree([3], []))
        rig.propose(DraftTree([3, 4], [], [0, 0]), drafter=other)
        first = rig.assignment()
        before = first.sibling_rates.rescued_share
        observe_siblings(rig.sequences[0], first, [4], threshold)
        assert (first.sibling_rates.rescued_share > before) == rescues


def test_sampled_chains_count_in_the_room_that_trees_share() -> None:
    offers = frozenset({DraftDistribution.SPARSE, DraftDistribution.ONE_HOT})
    rig = Rig(0.5, trust=True, distributions=offers)
    greedy = rig.engine.submit(TokenRequest([1, 2], 50, GREEDY), Client())
    rig.engine.step()
    rig.sequences.append(greedy)
    rig.propose(DraftTree([3, 4], []))
    rig.propose(DraftTree([3, 4, 5], [], [0, 1, 0]), sequence=1)
    for room, taken in ((4, 2), (3, 1), (2, 0)):
        _, tree = rig.grow(depth=2, room=room)
        assert len(tree.token_ids) == taken


@pytest.mark.parametrize(("draft_tokens", "most"), [(None, 8), (4, 4)])
def test_with_always_draft_no_drafters_tokens_displace_anothers(
    draft_tokens: int | None, most: int
) -> None:
    """With `draft_tokens`, the request limits the tree's tokens."""
    rig = Rig(0.5, 0.95)
    [sequence] = rig.sequences
    speculation = replace(sequence.request.speculation, draft_tokens=draft_tokens)
    sequence.request = replace(sequence.request, speculation=speculation)
    rig.propose(DraftTree([3, 4, 5, 6], []), 0)
    rig.propose(DraftTree([7, 8, 9, 10], []), 1)
    [tree] = rig.grow(depth=4, policy=EVERY_DRAFT)
    assert len(tree.token_ids) == most
    assert tree.token_ids[:4] == [7, 8, 9, 10]
