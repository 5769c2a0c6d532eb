"""A tree's draft tokens are cut and masked as its paths alone would be, with either backend."""

from __future__ import annotations

import random

import numpy as np
import pytest
from grammar_texts import BACKENDS, ENDS, VOCAB, allowed, compiler, schema
from random_trees import random_tree

from outrider.grammar.backends import Compiled, Mask, Matcher
from outrider.grammar.kinds import Backend
from outrider.lm.pages import KVSequence
from outrider.protocol.messages import SamplingParams, SpeculationStats, TokenRequest
from outrider.protocol.token_tree import path_to
from verifier_svc.state.scheduled_sequence import ScheduledSequence
from verifier_svc.state.sequence import Sequence
from verifier_svc.state.trie import DraftTree
from verifier_svc.verification.grammar_masks import GrammarMasks

SCHEMA = schema(
    {
        "type": "object",
        "properties": {"a": {"enum": ["x", "yy", 12]}, "b": {"type": "boolean"}},
        "required": ["a", "b"],
    }
)


def sequence_with(matcher: Matcher, committed: list[int]) -> Sequence:
    request = TokenRequest([5], 99, SamplingParams(0.0))
    sequence = Sequence(
        id=1,
        request=request,
        seed=0,
        max_draft_tokens=8,
        end_ids=frozenset(ENDS),
        kv=KVSequence(),
        sink=lambda chunk: None,
        tokens=[5, *committed],
        stats=SpeculationStats(max_draft_tokens=8),
    )
    sequence.matcher = matcher
    sequence.mask_width = -(-VOCAB // 32)
    return sequence


def continuation(
    compiled: Compiled, tokens: list[int], rng: random.Random, count: int
) -> list[int]:
    """Tokens that the grammar allows behind others, at most `count` of them."""
    matcher = compiled.matcher()
    assert all(matcher.accept(token) for token in tokens)
    mask: Mask = np.zeros((1, -(-VOCAB // 32)), np.int32)
    found: list[int] = []
    while len(found) < count and not matcher.ended:
        matcher.fill(mask, 0)
        found.append(int(rng.choice(allowed(mask))))
        assert matcher.accept(found[-1])
    return found


def grammatical_tree(compiled: Compiled, committed: list[int], seed: int) -> DraftTree:
    """A tree of random tokens around two continuations that the grammar allows."""
    rng = random.Random(seed)
    noise = np.random.default_rng(seed)
    main_path = continuation(compiled, committed, rng, 4)
    likely = [*main_path[:1], *continuation(compiled, committed + main_path[:1], rng, 5)]
    return random_tree(noise, 24, 300, likely, main_path)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_trees_rows_have_the_masks_of_their_paths(backend: Backend) -> None:
    compiled = compiler(backend).compile(SCHEMA)
    branched = 0
    for seed in range(25):
        committed = continuation(compiled, [], random.Random(seed), seed % 5)
        matcher = compiled.matcher()
        assert all(matcher.accept(token) for token in committed)
        sequence = sequence_with(matcher, committed)
        if matcher.ended:
            continue
        tree = grammatical_tree(compiled, committed, seed)
        masks = GrammarMasks()
        batch = masks.cut([ScheduledSequence(sequence, 0, [5], tree, None, True)])
        [masked] = masks.masks(batch)()
        assert masked.mask is not None
        draft = masked.draft
        branched += bool(draft.parents)
        parents = draft.parents or list(range(len(draft.token_ids)))
        for row in range(len(parents) + 1):
            path = [draft.token_ids[at - 1] for at in path_to(row, parents)]
            alone = compiled.matcher()
            assert all(alone.accept(token) for token in (*committed, *path))
            if not alone.ended:
                own: Mask = np.zeros((1, sequence.mask_width), np.int32)
                alone.fill(own, 0)
                assert (masked.mask[row] == own[0]).all()
        # The matcher stands where it was.
        again: Mask = np.zeros((1, sequence.mask_width), np.int32)
        matcher.fill(again, 0)
        assert (masked.mask[0] == again[0]).all()
    assert branched > 5
