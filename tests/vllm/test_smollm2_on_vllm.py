"""In float32, vLLM with SmolLM2 writes the texts of transformers and of our engine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outrider.protocol.messages import (
    SamplingParams,
    SpeculationOptions,
    TokenRequest,
)
from tests.smollm2_texts import TOKENS, Reference, answers, smollm2, tokens_of
from tests.stack import ROOT, Client, Stack, running
from tests.vllm.conftest import FLAGS, START_S

pytestmark = pytest.mark.slow  # A model of 135 million parameters on both engines.

PLAIN = SpeculationOptions(enabled=False)
WAYS = {
    "no drafter": PLAIN,
    "ngram": SpeculationOptions(drafter_id="ngram", always_draft=True),
    "model": SpeculationOptions(drafter_id="model", always_draft=True),
    "all at once": SpeculationOptions(always_draft=True),
}


def stack_of(file: str, *flags: str) -> Stack:
    """Return an engine with SmolLM2, an n-gram drafter and a draft model of another vocabulary."""
    stack = Stack(*flags, target=file)
    stack.add_drafter("ngram", "ngram")
    draft = str(ROOT / "models/draft-2048")
    stack.add_drafter("model", "model", "--model", draft, "--target", file)
    return stack


async def test_texts_are_those_of_transformers_and_seeds_those_of_our_own_engine() -> None:
    reference = Reference(smollm2())
    greedy = [
        TokenRequest(prompt, TOKENS, SamplingParams(temperature=0.0), top_logprobs=0)
        for prompt in reference.prompts
    ]
    seeded = [
        replace(request, sampling=SamplingParams(0.8, seed=i), top_logprobs=None)
        for i, request in enumerate(greedy)
    ]
    with running(stack_of(reference.file)) as native:
        async with Client(native.address) as client:
            plain = [replace(request, speculation=PLAIN) for request in seeded]
            wanted = list(map(tokens_of, await answers(client, plain)))
    with running(stack_of(reference.file, *FLAGS), START_S) as stack:
        for way, options in WAYS.items():
            async with Client(stack.address) as client:
                asked = [replace(request, speculation=options) for request in greedy]
                found = await answers(client, asked)
                errors = [reference.check(index, chunks) for index, chunks in enumerate(found)]
                asked = [replace(request, speculation=options) for request in seeded]
                drawn = await answers(client, asked)
            assert list(map(tokens_of, drawn)) == wanted, way
            drafted = sum(chunk.draft_token_count for chunks in drawn for chunk in chunks)
            assert (drafted > 0) is (way != "no drafter")
            print(f"{way}: {len(found)} texts, log probabilities within {max(errors):.1e}")
