"""Log probabilities of a prompt equal those of one forward of transformers over it."""

from dataclasses import replace
from itertools import dropwhile

import numpy as np
import pytest
import torch
from drafted import RandomDrafter, make_engine
from exact import VOCAB, equal_to_target, tiny_model

from outrider.protocol.draft_tokens_policy import DraftTokensPolicy
from outrider.protocol.messages import (
    AcceptanceRule,
    DraftDistribution,
    FinishReason,
    SamplingParams,
    TokenChunk,
    TokenRequest,
)
from verifier_svc.engine.config import EngineConfig
from verifier_svc.engine.loop import Engine

TOP = 5
POLICY = DraftTokensPolicy("fixed", 5)
TEXT = np.random.default_rng(7).integers(0, VOCAB, 64).tolist()
SCORED = TokenRequest(TEXT[:40], 3, SamplingParams(0.0), prompt_logprobs=TOP)


def few_rows(count: int) -> EngineConfig:
    """EngineConfig that allow so many rows of prompt logits a step."""
    return EngineConfig(POLICY, scored_logits_bytes=count * 4 * VOCAB)


def submit(engine: Engine, request: TokenRequest) -> list[TokenChunk]:
    """Submit a request; returns the list that collects its chunks."""
    found: list[TokenChunk] = []
    engine.submit(request, found.append)  # type: ignore[arg-type]  # an error would fail the test in `check`
    return found


def run(engine: Engine, drafter: RandomDrafter | None = None) -> None:
    while engine.sequences:
        engine.drain_inbox()
        if drafter is not None:
            drafter.send()
        engine.step()
    assert engine.pool.used_count == 0


def check(chunks: list[TokenChunk], request: TokenRequest) -> None:
    """The prompt's tokens but the first are scored once, in order, before the first new token."""
    scores = [logprob for chunk in chunks for logprob in chunk.prompt_logprobs]
    with torch.inference_mode():
        expected = tiny_model()(torch.tensor([request.prompt])).logits[0].log_softmax(-1)
    assert len(scores) == len(request.prompt) - 1
    for token, row, got in zip(request.prompt[1:], expected, scores, strict=False):
        assert got.logprob == pytest.approx(row[token].item(), abs=1e-4)
        assert got.rank == 1 + (row > row[token]).sum().item()
        top = row.topk(TOP)
        assert list(got.top_token_ids) == top.indices.tolist()
        assert got.top_logprobs == pytest.approx(top.values.tolist(), abs=1e-4)
    _, *later = dropwhile(lambda each: not each.token_ids and each.finish_reason is None, chunks)
    assert not any(chunk.prompt_logprobs for chunk in later)
    assert sum(len(chunk.token_ids) for chunk in chunks) == request.max_tokens


LIMITS = {
    "at once": EngineConfig(POLICY),
    "in chunks": EngineConfig(POLICY, max_batch_tokens=7),
    "a few rows a step": few_rows(3),
}


@pytest.mark.parametrize("config", LIMITS.values(), ids=LIMITS)
def test_prompt_scores_equal_transformers_while_drafts_are_verified(
    config: EngineConfig,
) -> None:
    engine = make_engine(AcceptanceRule.BLOCK, True, config)
    offers = frozenset({DraftDistribution.SPARSE})
    draft_probs = equal_to_target(SamplingParams())
    drafter = RandomDrafter(engine, draft_probs, offers, np.random.default_rng(0))
    requests = [
        replace(SCORED, prompt=TEXT[at : at + length])
        for at, length in enumerate((1, 2, 3, 8, 9, 21, 40))
    ]
    found = [submit(engine, request) for request in requests]
    run(engine, drafter)
    for chunks, request in zip(found, requests, strict=True):
        check(chunks, request)


def test_a_cached_prompt_is_scored_again_when_asked() -> None:
    engine = make_engine(AcceptanceRule.BLOCK, False, few_rows(8))
    plain = replace(SCORED, prompt_logprobs=None)
    cached = []
    for request in (SCORED, plain, SCORED, plain):
        chunks = submit(engine, request)
        run(engine)
        cached.append(chunks[-1].cached_token_count)
        if request is SCORED:
            check(chunks, request)
    assert cached == [0, 36, 0, 36]


def test_a_preempted_prompt_goes_on_where_its_scores_ended() -> None:
    engine = make_engine(AcceptanceRule.BLOCK, False, few_rows(1), page_count=14)
    older = submit(engine, replace(SCORED, prompt=TEXT[:4], max_tokens=40))
    engine.step()
    engine.step()
    chunks = submit(engine, SCORED)
    interrupted = False
    while engine.sequences:
        engine.step()
        interrupted |= any(
            1 < sequence.unscored.start < 40 for sequence in engine.scheduler.waiting
        )
    assert interrupted
    check(chunks, SCORED)
    check(older, replace(SCORED, prompt=TEXT[:4], max_tokens=40))


def test_without_tokens_to_generate_a_prompt_is_only_scored() -> None:
    engine = make_engine(AcceptanceRule.BLOCK, False, few_rows(16))
    for length in (1, 2, 64):
        request = replace(SCORED, prompt=TEXT[:length], max_tokens=0)
        chunks = submit(engine, request)
        run(engine)
        check(chunks, request)
        assert chunks[-1].finish_reason is FinishReason.LENGTH
