"""Log probabilities of tokens and prompts equal those from the target's logits."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import dropwhile

import numpy as np
import pytest

from outrider.protocol.messages import (
    DraftDistribution,
    SamplingParams,
    SpeculationOptions,
    TokenChunk,
    TokenLogprob,
    TokenRequest,
    TokenSource,
)
from tests.losslessness.exact import PROMPT, VOCAB, equal_to_target, logits, traffic
from tests.losslessness.guesser import Guesser
from tests.losslessness.traffic import step
from verifier_svc.engine.loop import Engine

TOP = 5
GREEDY = SamplingParams(0.0)
TEXT = np.random.default_rng(7).integers(0, VOCAB, 64).tolist()


def drafter(engine: Engine) -> Guesser:
    """Return a drafter that samples from the target's distribution after the prompt."""
    offers = frozenset({DraftDistribution.ONE_HOT, DraftDistribution.SPARSE})
    made = Guesser("sampling", equal_to_target(SamplingParams()), offers)
    made.join(engine)
    return made


def submit(engine: Engine, request: TokenRequest) -> list[TokenChunk]:
    """Submit a request; return the list that collects its chunks."""
    found: list[TokenChunk] = []
    engine.submit(request, found.append)
    return found


def run(engine: Engine, *drafters: Guesser) -> None:
    while engine.sequences:
        step(engine, drafters)
    assert engine.pool.used_count == 0


def must_be_those_of(
    text: Sequence[int], first: int, found: Sequence[TokenLogprob], top: int = TOP
) -> None:
    """Check the log probabilities of the text's tokens from position `first` on."""
    assert len(found) == len(text) - first
    for at, got in enumerate(found, first):
        row = logits(tuple(text[:at])).log_softmax(-1)
        assert got.logprob == pytest.approx(row[text[at]].item(), abs=1e-4)
        assert got.rank == 1 + (row > row[text[at]]).sum().item()
        best = row.topk(top)
        assert list(got.top_token_ids) == best.indices.tolist()
        assert got.top_logprobs == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_logprobs_of_all_token_sources_are_the_targets(temperature: float) -> None:
    """Log probabilities are taken before any sampling setting is applied."""
    engine = traffic(SamplingParams()).engine
    guesser = drafter(engine)
    request = TokenRequest(
        [*PROMPT],
        8,
        SamplingParams(temperature, 8, repetition_penalty=1.2),
        speculation=SpeculationOptions(draft_tokens=5),
        top_logprobs=TOP,
        min_chunk_tokens=3,
    )
    answers = [submit(engine, request) for _ in range(40)]
    run(engine, guesser)
    sources = set()
    for chunks in answers:
        tokens = [token for chunk in chunks for token in chunk.token_ids]
        assert len(tokens) == 8
        found = [logprob for chunk in chunks for logprob in chunk.logprobs]
        must_be_those_of([*PROMPT, *tokens], len(PROMPT), found)
        sources |= {source for chunk in chunks for source in chunk.sources}
    assert sources >= {
        TokenSource.ACCEPTED,
        TokenSource.RECOVERED,
        TokenSource.BONUS,
        TokenSource.PLAIN,
    }


def test_logprobs_are_a_sequences_own_in_a_batch_of_which_only_some_want_them() -> None:
    """The prompts differ, so another sequence's rows have other log probabilities."""
    engine = traffic(SamplingParams()).engine
    prompts = [[*PROMPT, i % 3, i // 3] for i in range(6)]
    wanted = [2 if i in (1, 2, 5) else None for i in range(6)]
    answers = [
        submit(engine, TokenRequest(prompt, 5, GREEDY, top_logprobs=top))
        for prompt, top in zip(prompts, wanted, strict=True)
    ]
    run(engine)
    for prompt, top, chunks in zip(prompts, wanted, answers, strict=True):
        tokens = [token for chunk in chunks for token in chunk.token_ids]
        found = [logprob for chunk in chunks for logprob in chunk.logprobs]
        if top is None:
            assert not found
        else:
            must_be_those_of([*prompt, *tokens], len(prompt), found, top)


@pytest.mark.parametrize("max_batch_tokens", [2048, 7], ids=["at once", "in chunks"])
def test_a_prompts_tokens_but_the_first_are_scored_in_order_before_the_first_new_token(
    max_batch_tokens: int,
) -> None:
    """The prompts are scored while drafts of other sequences are verified."""
    engine = traffic(SamplingParams(), max_batch_tokens=max_batch_tokens).engine
    guesser = drafter(engine)
    prompts = [TEXT[at : at + length] for at, length in enumerate((1, 2, 3, 8, 9, 21, 40))]
    answers = [
        submit(engine, TokenRequest(prompt, 3, GREEDY, prompt_logprobs=TOP)) for prompt in prompts
    ]
    run(engine, guesser)
    for prompt, chunks in zip(prompts, answers, strict=True):
        scores = [logprob for chunk in chunks for logprob in chunk.prompt_logprobs]
        must_be_those_of(prompt, 1, scores)
        _, *later = dropwhile(lambda each: not each.token_ids, chunks)
        assert not any(chunk.prompt_logprobs for chunk in later)
        assert sum(len(chunk.token_ids) for chunk in chunks) == 3
