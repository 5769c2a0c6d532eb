"""The engine with trees of draft tokens: settings of a request, grammars, counts and sources."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.protocol.draft_messages import Proposal
from outrider.protocol.draft_tokens_policy import DraftTokensPolicy
from outrider.protocol.messages import (
    DraftDistribution,
    SamplingParams,
    TokenChunk,
    TokenLogprob,
    TokenRequest,
    TokenSource,
)
from tests.random_trees import TreeGrafter, random_tree
from tests.toy_grammars import NoRepeats
from tests.tree_paths import path_to
from tests.verifier.fake_model import (
    EOS,
    GREEDY,
    VOCAB,
    Client,
    ScriptedDrafter,
    TableModel,
    exposition,
    finish,
    make_engine,
)
from verifier_svc.engine.config import EngineConfig
from verifier_svc.engine.loop import Engine
from verifier_svc.state.scheduled_sequence import ScheduledSequence
from verifier_svc.state.sequence import Sequence as Request
from verifier_svc.state.trie import DraftTree
from verifier_svc.verification.batch import DraftVerifier
from verifier_svc.verification.grammar_masks import GrammarMasks


@dataclass
class Answer:
    """The tokens, log probabilities and finish reason of a request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    reason: object = None


def answers(
    requests: list[TokenRequest], *, grammar: bool, seed: int | None, likely: list[Answer]
) -> tuple[list[Answer], Engine]:
    """Return the answers of an engine that verifies random trees, drawn with `seed`.

    Without a seed, the engine verifies no drafts. The engine is returned too.
    """
    engine, model = make_engine(page_size=3, page_count=20, seed=3, eos_bias=-2.0)
    clients = [Client() for _ in requests]
    places: dict[int, int] = {}
    for i, (request, client) in enumerate(zip(requests, clients, strict=True)):
        sequence = engine.submit(request, client)
        places[sequence.id] = i
        if grammar:
            sequence.matcher = NoRepeats()
            sequence.mask_width = 1

    def goes_on(sequence: Request) -> list[int]:
        done = len(sequence.tokens) - len(sequence.request.prompt)
        return likely[places[sequence.id]].tokens[done:] if likely else []

    moved = watched(model)
    if seed is not None:
        TreeGrafter(engine, seed, VOCAB, goes_on, most=12)
    finish(engine)
    assert seed is None or moved
    found = []
    for client in clients:
        assert client.error is None
        logprobs = [each for chunk in client.chunks for each in chunk.logprobs]
        found.append(Answer(client.tokens, logprobs, client.finish_reason))
    return found, engine


def watched(model: TableModel) -> list[int]:
    """Return a list that grows by each slot that is moved."""
    moved: list[int] = []
    move_tokens = model.move_tokens

    def watch(sources: Sequence[int], targets: Sequence[int]) -> None:
        moved.extend(sources)
        move_tokens(sources, targets)

    model.move_tokens = watch  # type: ignore[method-assign]
    return moved


SETTINGS = {
    "plain": SamplingParams(),
    "penalties": SamplingParams(
        repetition_penalty=1.4, presence_penalty=0.6, frequency_penalty=0.5
    ),
    "min_tokens": SamplingParams(min_tokens=9),
    "bans and bias": SamplingParams(banned_token_ids=(2, 5), logit_bias=((EOS, -2.0), (1, 1.0))),
    "truncated": SamplingParams(top_k=4, top_p=0.9, min_p=0.02),
}


@pytest.mark.parametrize("trees", [False, True])
def test_no_forward_computes_a_position_behind_prompt_and_answer(trees: bool) -> None:
    """A context that has room for prompt and answer has room for the drafts too."""
    config = EngineConfig(DraftTokensPolicy("fixed", 6), draft_trees=trees)
    engine, model = make_engine(config=config, always_draft=True, eos_bias=-9.0)
    drafter = ScriptedDrafter(engine)
    right = model.greedy([1, 2], 40)
    last: list[int] = []
    model.broken = lambda slices: last.append(max(slices[0].positions))
    sequence = engine.submit(TokenRequest([1, 2], 20, GREEDY, ignore_eos=True), Client())
    engine.drain_inbox()
    while engine.sequences:
        written = len(sequence.tokens) - 2
        ahead = right[written : written + 8]
        parents = list(range(8))
        if trees:
            # Each token has a sibling.
            ahead, parents = [*ahead, *map(other, ahead)], parents * 2
        drafter.send(Proposal(sequence.id, len(sequence.tokens), ahead, parents))
        engine.step()
    # No forward reads the answer's last token.
    assert max(last) == 2 + 20 - 2
    assert sequence.stats.accepted_token_count > 10


@pytest.mark.parametrize("grammar", [False, True], ids=["free", "grammar"])
@pytest.mark.parametrize("name", SETTINGS)
def test_trees_change_no_answer_of_any_setting(name: str, grammar: bool) -> None:
    requests = [
        TokenRequest(
            [1, 2, i % 7],
            20,
            replace(SETTINGS[name], temperature=i % 2, seed=1000 + i),
            top_logprobs=2,
        )
        for i in range(12)
    ]
    plain, _ = answers(requests, grammar=grammar, seed=None, likely=[])
    for seed in range(2):
        found, engine = answers(requests, grammar=grammar, seed=seed, likely=plain)
        assert [each.tokens for each in found] == [each.tokens for each in plain]
        assert [each.reason for each in found] == [each.reason for each in plain]
        assert engine.scheduler.preemption_count > 0
        for got, wanted in zip(found, plain, strict=True):
            for one, other in zip(got.logprobs, wanted.logprobs, strict=True):
                assert one.logprob == pytest.approx(other.logprob, abs=1e-6)
                assert one.top_token_ids == other.top_token_ids


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=60)
def test_a_grammar_cuts_a_tree_and_masks_each_row_as_its_path(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, 14, VOCAB)
    engine, _ = make_engine()
    sequence = engine.submit(TokenRequest([3], 9, GREEDY), Client())
    matcher = sequence.matcher = NoRepeats()
    matcher.accept(4)
    sequence.mask_width = 1
    masks = GrammarMasks()
    batch = masks.cut([ScheduledSequence(sequence, 0, [3], tree, None, True)])
    [masked] = masks.masks(batch)()
    assert matcher.text == [4]
    assert masked.mask is not None
    assert not masked.draft.parents or masked.draft.parents != list(range(len(masked.mask) - 1))
    rows = {}
    for row, path in enumerate(paths(masked.draft)):
        alone = NoRepeats()
        assert all(alone.accept(token) for token in (4, *path))
        mask = np.zeros((1, 1), np.int32)
        alone.fill(mask, 0)
        assert alone.ended or masked.mask[row] == mask[0]
        rows[tuple(path)] = row
    assert list(rows.values()) == list(range(len(masked.draft.token_ids) + 1))
    # The cut removed no other rows, and kept the order of the remaining rows.
    left = [path for path in paths(tree) if fits([4, *path])]
    assert list(rows) == [tuple(path) for path in left]


def paths(tree: DraftTree) -> list[list[int]]:
    """Return the draft tokens before each row of a tree."""
    parents = tree.parents or list(range(len(tree.token_ids)))
    return [
        [tree.token_ids[at - 1] for at in path_to(row, parents)] for row in range(len(parents) + 1)
    ]


def fits(text: list[int]) -> bool:
    matcher = NoRepeats()
    return all(matcher.accept(token) for token in text)


def test_the_thinking_phase_of_a_token_is_that_of_its_path() -> None:
    verifier = DraftVerifier(thinking_ids=(5, 6))
    parents = [0, 1, 0, 3, 3]
    assert verifier._thinking([1, 5], [3, 6, 6, 4, 5], parents) == [True, False] + [False] * 3
    assert verifier._thinking([1], [5, 3, 2, 5, 3], parents) == [False, True, False, False, False]


class Fixed(GrammarMasks):
    """Replaces the drafts of successive steps by the given trees."""

    def __init__(self, engine: Engine, *trees: DraftTree) -> None:
        super().__init__()
        self._pool = engine.pool
        self._trees = [*trees]
        engine._grammar_masks = self

    def cut(self, batch: Sequence[ScheduledSequence]) -> list[ScheduledSequence]:
        [scheduled] = batch
        if not self._trees:
            return [scheduled]
        tree = self._trees.pop(0)
        end = scheduled.start + len(scheduled.token_ids) + len(tree.token_ids)
        assert self._pool.reserve(scheduled.sequence.kv, end)
        return [replace(scheduled, draft=tree)]


def other(*tokens: int) -> int:
    """Return a token other than these."""
    return next(token for token in range(VOCAB) if token not in tokens)


def run_fixed(tree: DraftTree, truth: list[int], **request: object) -> list[TokenChunk]:
    """Return the chunks of a request with prompt [1, 2] whose first step verifies the tree."""
    engine, _ = make_engine(eos_bias=-99)
    client = Client()
    asked = TokenRequest([1, 2], len(truth), GREEDY, **request)
    engine.submit(asked, client)
    Fixed(engine, tree)
    finish(engine)
    return client.chunks


TRUTH = make_engine(eos_bias=-99)[1].greedy([1, 2], 10)
SIDE = TokenSource.ACCEPTED_SIDE
RECOVERED, BONUS = TokenSource.RECOVERED, TokenSource.BONUS


def test_the_own_token_behind_a_leaf_is_a_bonus_and_else_recovered() -> None:
    wrong = other(TRUTH[0])
    # Row 1 is a wrong guess on the main path, row 2 follows it; rows 3 and 4 are right.
    tree = DraftTree([wrong, 0, TRUTH[0], TRUTH[1]], [], [0, 1, 0, 3])
    first, *rest = run_fixed(tree, TRUTH)
    assert first.token_ids == TRUTH[:3]
    assert first.sources == [SIDE, SIDE, BONUS]
    assert (first.draft_token_count, first.side_draft_token_count) == (4, 2)
    tree = DraftTree([wrong, 0, TRUTH[0], other(TRUTH[1])], [], [0, 1, 0, 3])
    first, *rest = run_fixed(tree, TRUTH)
    assert first.sources == [SIDE, RECOVERED]
    tree = DraftTree([wrong, other(TRUTH[0], wrong)], [], [0, 0])
    first, *rest = run_fixed(tree, TRUTH)
    assert first.sources == [RECOVERED]
    assert [token for chunk in (first, *rest) for token in chunk.token_ids] == TRUTH


def test_a_drafters_rate_counts_main_guesses_and_its_metrics_all_tokens() -> None:
    engine, _ = make_engine(eos_bias=-99)
    offers = frozenset({DraftDistribution.ONE_HOT})
    drafter = ScriptedDrafter(engine, distributions=offers)
    sequence = engine.submit(TokenRequest([1, 2], 10, GREEDY), Client())
    engine.drain_inbox()
    wrong = other(TRUTH[1])
    tree = DraftTree([TRUTH[0], wrong, 0, TRUTH[1]], [], [0, 1, 2, 1])
    drafter.propose(sequence.id, tree.token_ids[:3])
    Fixed(engine, tree)
    engine.step()
    assert sequence.tokens[2:] == TRUTH[:3]
    assert (drafter.handle.verified_count, drafter.handle.accepted_count) == (4, 2)
    rates = sequence.assignments["scripted"].rate.by_position
    assert rates[0] > 0.8 > rates[1]
    # The step's counts are exported when the inbox is drained.
    engine.drain_inbox()
    text = exposition(engine)
    for name, labels, count in (
        ("drafts_by_shape", 'model_name="fake",shape="tree"', 1),
        ("draft_tokens_by_shape", 'model_name="fake",shape="tree"', 4),
        ("emitted_tokens_by_shape", 'model_name="fake",shape="tree"', 3),
        ("accepted_tokens_by_branch", 'branch="main",model_name="fake"', 1),
        ("accepted_tokens_by_branch", 'branch="side",model_name="fake"', 1),
    ):
        metric = f"outrider:spec_decode_num_{name}_total"
        assert f"{metric}{{{labels}}} {count}.0" in text
