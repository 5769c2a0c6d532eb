"""Log probabilities equal those of one forward over the finished text."""

import numpy as np
import pytest
import torch
from drafted import RandomDrafter, make_engine
from exact import PROMPT, equal_to_target, tiny_model

from outrider.protocol.messages import (
    AcceptanceRule,
    DraftDistribution,
    SamplingParams,
    SpeculationOptions,
    TokenChunk,
    TokenRequest,
    TokenSource,
)


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_logprobs_of_all_token_sources_equal_a_rescoring_forward(
    temperature: float,
) -> None:
    engine = make_engine(AcceptanceRule.BLOCK, trust=True)
    offers = frozenset({DraftDistribution.SPARSE})
    draft_probs = equal_to_target(SamplingParams())
    drafter = RandomDrafter(engine, draft_probs, offers, np.random.default_rng(0))
    sampling = SamplingParams(temperature, 8, repetition_penalty=1.2)
    chunks: dict[int, list[TokenChunk]] = {i: [] for i in range(40)}
    for found in chunks.values():
        request = TokenRequest(
            PROMPT,
            8,
            sampling=sampling,
            speculation=SpeculationOptions(draft_tokens=5),
            top_logprobs=5,
            min_chunk_tokens=3,
        )
        engine.submit(request, found.append)  # type: ignore[arg-type]  # an error fails the test as well
    while engine.sequences:
        engine.drain_inbox()
        drafter.send()
        engine.step()
    sources = set()
    for found in chunks.values():
        tokens = [token for chunk in found for token in chunk.token_ids]
        logprobs = [logprob for chunk in found for logprob in chunk.logprobs]
        sources |= {source for chunk in found for source in chunk.sources}
        with torch.inference_mode():
            logits = tiny_model()(torch.tensor([[*PROMPT, *tokens]])).logits
        expected = logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
        assert len(logprobs) == len(tokens) == 8
        for token, row, got in zip(tokens, expected, logprobs, strict=True):
            assert got.logprob == pytest.approx(row[token].item(), abs=1e-4)
            top = row.topk(5)
            assert got.top_logprobs == pytest.approx(top.values.tolist(), abs=1e-4)
            assert list(got.top_token_ids) == top.indices.tolist()
    assert sources >= {
        TokenSource.ACCEPTED,
        TokenSource.RECOVERED,
        TokenSource.BONUS,
        TokenSource.PLAIN,
    }


@pytest.mark.parametrize("wanting", [{1, 2, 5}, {0, 3}])
def test_logprobs_are_a_sequences_own_in_a_batch_of_which_only_some_want_them(
    wanting: set[int],
) -> None:
    """The prompts differ, so another sequence's rows have other log probabilities."""
    engine = make_engine(AcceptanceRule.BLOCK, trust=False)
    chunks: dict[int, list[TokenChunk]] = {i: [] for i in range(6)}
    prompts = {i: [*PROMPT, i % 3, i // 3] for i in chunks}
    for i, found in chunks.items():
        top = 2 if i in wanting else None
        request = TokenRequest(prompts[i], 5, SamplingParams(0.0), top_logprobs=top)
        engine.submit(request, found.append)  # type: ignore[arg-type]  # an error fails the test as well
    while engine.sequences:
        engine.step()
    for i, found in chunks.items():
        tokens = [token for chunk in found for token in chunk.token_ids]
        logprobs = [logprob for chunk in found for logprob in chunk.logprobs]
        assert len(logprobs) == (len(tokens) if i in wanting else 0)
        with torch.inference_mode():
            logits = tiny_model()(torch.tensor([[*prompts[i], *tokens]])).logits
        expected = logits[0, len(prompts[i]) - 1 : -1].log_softmax(-1)
        for token, row, got in zip(tokens, expected, logprobs, strict=False):
            assert got.logprob == pytest.approx(row[token].item(), abs=1e-4)
