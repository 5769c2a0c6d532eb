"""Trees of draft tokens change no text: the tests check the rules, and the engine's pages."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.protocol.draft_messages import SparseDistribution
from outrider.protocol.draft_tokens_policy import DraftTokensPolicy
from outrider.protocol.messages import (
    AcceptanceRule,
    DraftDistribution,
    SamplingParams,
    SpeculationOptions,
)
from outrider.sampling.context import Context
from tests.accepting import accept
from tests.losslessness import reference
from tests.losslessness.chi_square import compare
from tests.losslessness.guesser import Guesser
from tests.losslessness.small import VOCAB, near, target_probs
from tests.losslessness.traffic import Traffic, seed_of
from tests.random_trees import TreeGrafter, random_tree, shuffled
from tests.tree_paths import path_to
from verifier_svc.state.sequence import Sequence as Request
from verifier_svc.state.trie import DraftTree
from verifier_svc.verification.draft import NOT_FINITE, Draft

WIDE = 6
# Not a ratio of small integers: a probability must not lie on a bound, where rounding decides.
OPTIONS = SpeculationOptions(typical_epsilon=0.3007, relaxed_top_k=3, relaxed_delta=0.2003)
RULES = (
    AcceptanceRule.GREEDY,
    AcceptanceRule.COUPLED,
    AcceptanceRule.TYPICAL,
    AcceptanceRule.RELAXED,
)
SPARSE = SparseDistribution(np.array([1, 2]), np.array([0.5, 0.5]))
COUPLED = frozenset({DraftDistribution.ONE_HOT, DraftDistribution.COUPLED})


def logits_behind(seed: int, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
    """Return random logits of a text's next token."""
    rng = np.random.default_rng([seed, zlib.crc32(bytes(tokens))])
    return rng.normal(size=WIDE).astype(np.float32)


def logits_of(seed: int, tree: DraftTree) -> npt.NDArray[np.float32]:
    """Return the logits of a tree's rows, [R, V]."""
    parents = tree.parents or range(len(tree.token_ids))
    texts = [
        [tree.token_ids[at - 1] for at in path_to(row, parents)]
        for row in range(len(tree.token_ids) + 1)
    ]
    return np.stack([logits_behind(seed, text) for text in texts])


def draft_of(tree: DraftTree, rule: AcceptanceRule, seed: int, position: int = 9) -> Draft:
    sampling = SamplingParams(0.0 if rule is AcceptanceRule.GREEDY else 1.0)
    context = Context(sampling, [0] * position, 1, tree.token_ids, parents=tree.parents)
    thinking = []
    if rule is AcceptanceRule.RELAXED:
        thinking = [token % 3 > 0 for token in tree.token_ids]
    return Draft(context, seed, rule, (), OPTIONS, thinking)


def by_reference(
    tree: DraftTree, rule: AcceptanceRule, seed: int, logits: npt.NDArray[np.float32]
) -> reference.AcceptedPath:
    probs = torch.from_numpy(logits).softmax(-1).double().numpy()
    coins = reference.Coins(seed, 9)
    first = {parent: row for row, parent in reversed([*enumerate(tree.parents, 1)])}

    def own(row: int, depth: int) -> int:
        if rule is AcceptanceRule.GREEDY:
            return int(logits[row].argmax())
        return coins.draw(probs[row], depth)

    def likes(row: int, token: int) -> bool:
        assert tree.token_ids[first[row] - 1] == token
        if rule is AcceptanceRule.TYPICAL:
            return reference.is_typical(probs[row], token, 0.3007)
        is_relaxed = rule is AcceptanceRule.RELAXED and token % 3 > 0
        return is_relaxed and reference.is_near(probs[row], token, 3, 0.2003)

    return reference.tree(tree.parents, tree.token_ids, own, likes)


@pytest.mark.parametrize("rule", RULES)
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=60)
def test_a_batch_of_trees_and_chains_accepts_what_the_reference_does(
    rule: AcceptanceRule, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    trees = [random_tree(rng, int(rng.integers(0, 20)), WIDE) for _ in range(4)]
    logits = [logits_of(seed + i, tree) for i, tree in enumerate(trees)]
    drafts = [draft_of(tree, rule, seed + i) for i, tree in enumerate(trees)]
    found = accept(torch.from_numpy(np.concatenate(logits)), drafts)
    for i, (tree, result) in enumerate(zip(trees, found, strict=True)):
        chain = list(range(len(tree.token_ids)))
        tree = DraftTree(tree.token_ids, [], tree.parents or chain)
        expected = by_reference(tree, rule, seed + i, logits[i])
        assert list(result.rows) == expected.rows
        assert result.accepted_count == len(expected.rows)
        assert result.next_token == expected.next_token
        assert (result.path is None) == (expected.rows == list(range(1, len(expected.rows) + 1)))


@pytest.mark.parametrize("rule", [AcceptanceRule.GREEDY, AcceptanceRule.COUPLED])
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=60)
def test_the_order_of_siblings_changes_no_token(rule: AcceptanceRule, seed: int) -> None:
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, 20, WIDE)
    texts = []
    for each in (tree, *[shuffled(tree, rng)[0] for _ in range(3)]):
        logits = torch.from_numpy(logits_of(seed, each))
        [result] = accept(logits, [draft_of(each, rule, seed)])
        texts.append([*[each.token_ids[row - 1] for row in result.rows], result.next_token])
    assert texts[1:] == texts[:1] * 3


@pytest.mark.parametrize("rule", RULES)
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=40)
def test_the_walk_stops_with_an_error_at_a_row_that_is_not_finite(
    rule: AcceptanceRule, seed: int
) -> None:
    """Rows that the walk does not reach may hold anything."""
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, 12, WIDE)
    logits = torch.from_numpy(logits_of(seed, tree))
    draft = draft_of(tree, rule, seed)
    [whole] = accept(logits, [draft])
    row = int(rng.integers(0, len(logits)))
    logits[row, int(rng.integers(WIDE))] = torch.nan
    [broken] = accept(logits, [draft])
    visited = [0, *whole.rows]
    if row in visited:
        assert [0, *broken.rows] == visited[: visited.index(row) + 1]
        assert broken.next_token == NOT_FINITE
    else:
        assert broken == whole


def test_a_sampled_draft_that_is_a_tree_is_refused() -> None:
    context = Context(SamplingParams(), [0], 1, [1, 2], parents=[0, 0])
    with pytest.raises(ValueError, match="chain"):
        accept(
            torch.zeros(3, WIDE),
            [Draft(context, 0, AcceptanceRule.BLOCK, [SPARSE, SPARSE])],
        )


# --- the engine ---


SMALL_POOL = {
    "page_size": 2,
    "page_count": 56,
    "concurrent": 12,
    "max_batch_tokens": 64,
    "length": 9,
}


def with_trees(traffic: Traffic, seed: int, plain: dict[int, list[int]] | None = None) -> list[int]:
    """Make the traffic verify trees; return a list that gets the number of slots of each move.

    `plain` maps a seed to the text of plain decoding.
    """

    def likely(request: Request) -> list[int]:
        done = len(request.tokens) - len(request.request.prompt)
        return (plain or {}).get(request.seed, [])[done:]

    TreeGrafter(traffic.engine, seed, VOCAB, likely)
    return moves_of(traffic)


def moves_of(traffic: Traffic) -> list[int]:
    """Return a list that gets the number of slots of each move."""
    moves: list[int] = []
    move_tokens = traffic.model.move_tokens

    def counted(sources: Sequence[int], targets: Sequence[int]) -> None:
        moves.append(len(sources))
        move_tokens(sources, targets)

    # The test counts the calls of one object's method.
    traffic.model.move_tokens = counted  # type: ignore[method-assign]
    return moves


def two_guessers() -> tuple[Guesser, Guesser]:
    """Return two drafters with branches. The first guesses better than the second."""
    return (
        Guesser("first", near(target_probs), COUPLED, late=1, branches=True),
        Guesser("second", near(target_probs, 0.5, seed=2), COUPLED, late=1, branches=True),
    )


@pytest.mark.parametrize("page_size", [2, 3])
def test_a_seed_gives_the_same_text_with_trees_of_two_drafters(page_size: int) -> None:
    """The engine builds the trees out of both drafters' branches."""
    options = {**SMALL_POOL, "page_size": page_size, "page_count": 112 // page_size}
    plain = Traffic(seed=seed_of, length=9).run(300)
    policy = DraftTokensPolicy("fixed", 6)
    traffic = Traffic(seed=seed_of, trees=True, policy=policy, **options)
    moves = moves_of(traffic)
    assert traffic.run(300, *two_guessers()).tolist() == plain.tolist()
    assert sum(moves) > 50
    assert traffic.engine.scheduler.preemption_count > 5
    assert traffic.engine.scheduler.cached_token_count > 100


def test_texts_follow_the_target_with_trees_of_two_drafters() -> None:
    traffic = Traffic(trust=False, trees=True, policy=DraftTokensPolicy("fixed", 5))
    moves = moves_of(traffic)
    texts = traffic.run(4_000, *two_guessers())
    assert sum(moves) > 100
    compare(traffic.observed(texts), traffic.expected(4_000)).must_agree(sees=0.081)


def test_a_second_request_reads_the_pages_that_trees_left() -> None:
    """The target reads its whole text from its pages, so a wrong page changes the output."""
    first = Traffic(seed=seed_of, prompts=((1, 2),), length=40, page_size=2)
    plain = first.run(1).tolist()[0]
    moved = 0
    for seed in range(10):
        traffic = Traffic(seed=seed_of, prompts=((1, 2),), length=40, page_size=2)
        moves = with_trees(traffic, seed, {seed_of(0): plain})
        assert traffic.run(1).tolist() == [plain]
        moved += sum(moves)
        traffic.prompts = ((1, 2, *plain[:30]),)
        traffic.length = 5
        again = Traffic(seed=seed_of, prompts=traffic.prompts, length=5, page_size=2).run(1)
        assert traffic.run(1).tolist() == again.tolist()
        assert traffic.engine.scheduler.cached_token_count >= 28
    assert moved > 25
