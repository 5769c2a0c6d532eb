"""vLLM's workers draw from a batch the tokens that our engine commits."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from outrider.protocol.messages import SamplingParams
from outrider.sampling.context import Context
from outrider.sampling.penalties import TokenCounts
from tests.accepting import accept
from tests.vllm.cases import Case, seed_of
from verifier_svc.verification.draft import Draft
from verifier_svc.vllm.parameters import drawing_of, sequence_id_of, vllm_parameters

pytestmark = pytest.mark.filterwarnings("default")

VOCAB = 1500  # more than the tokens that top-p looks at first


def random_draft(rng: np.random.Generator) -> Draft:
    """Return a draft with its settings and its text."""
    sampling = SamplingParams(
        temperature=float(rng.choice([0.0, 0.7, 1.3])),
        top_k=int(rng.choice([0, 30])),
        top_p=float(rng.choice([1.0, 0.99, 0.6])),
        min_p=float(rng.choice([0.0, 0.02])),
        typical_p=float(rng.choice([1.0, 0.9])),
        repetition_penalty=float(rng.choice([1.0, 1.4])),
        frequency_penalty=float(rng.choice([0.0, 0.5])),
        logit_bias=((3, 1.5), (7, -2.0)) if rng.random() < 0.5 else (),
        banned_token_ids=(5, 6) if rng.random() < 0.5 else (),
        min_tokens=int(rng.choice([0, 8])),
    )
    text = rng.integers(0, 40, 12).tolist()
    drafted = rng.integers(0, 40, int(rng.integers(0, 4))).tolist()
    context = Context(sampling, text, 6, drafted, frozenset({1, 2}))
    return Draft(context, int(rng.integers(2**63)))


def test_every_row_draws_the_token_that_our_own_engine_commits_there() -> None:
    from verifier_svc.vllm.noise import draw_tokens

    rng = np.random.default_rng(3)
    for _ in range(20):
        drafts = [random_draft(rng) for _ in range(int(rng.integers(1, 6)))]
        row_count = sum(draft.context.row_count for draft in drafts)
        logits = torch.from_numpy(rng.normal(0, 2, (row_count, VOCAB))).float()
        drawn = draw_tokens(logits, drafts, TokenCounts()).tolist()
        first = 0
        for draft, result in zip(drafts, accept(logits, drafts), strict=True):
            own = drawn[first : first + draft.context.row_count]
            first += draft.context.row_count
            drafted = draft.context.drafted
            assert own[result.accepted_count] == result.next_token
            assert own[: result.accepted_count] == drafted[: result.accepted_count]


def test_settings_reach_the_worker_through_a_message() -> None:
    bias = [[4, 1.5], [9, -100.0]]
    sampling = {"temperature": 0.5, "top_k": 7, "logit_bias": bias, "banned_token_ids": [3, 8]}
    case = Case([1, 2, 3], {**sampling, "min_tokens": 4}, [11, 12], committed=[5, 6])
    sequence = case.sequence(17, seed_of(17))
    asked = vllm_parameters(sequence)
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(asked.extra_args))
    asked.extra_args = sent
    drawing = drawing_of(asked)
    assert drawing is not None
    assert sequence_id_of(asked) == 17
    assert drawing.sampling == SamplingParams(
        temperature=0.5,
        top_k=7,
        logit_bias=((4, 1.5), (9, -100.0)),
        banned_token_ids=(3, 8),
        min_tokens=4,
    )
    assert (drawing.seed, drawing.prompt_length) == (seed_of(17), 3)
    assert drawing.end_ids == {11, 12}
    assert asked.max_tokens == 22


def test_a_greedy_request_is_left_to_vllm() -> None:
    sequence = Case([1, 2, 3], {"temperature": 0.0}).sequence(5, 1)
    asked = vllm_parameters(sequence)
    assert drawing_of(asked) is None
    assert sequence_id_of(asked) == 5
