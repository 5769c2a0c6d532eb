"""The same seed gives the same text with any drafters and in any batch.

A text may differ where the two best candidates of a draw are as close as float32 rounding. The
prompts of this test lead to no such draw.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from outrider.protocol.messages import SamplingParams, SpeculationOptions, TokenRequest
from outrider.tokenizer import load_tokenizer
from tests.stack import TARGET, Answers, Client, Stack

TEXTS = (
    "def read(path):\n    ",
    "import os\n\nclass Cache:\n    def get(self, key):\n",
    "<|user|>Extract name, age, job and city as JSON: Ada, 31, works as a baker in Oslo."
    "<|end|><|assistant|>",
    "for i in range(10):\n    print(i)\nfor i in range(10):\n    print(",
    "x = [1, 2, 3]\ny = [1, 2, 3]\nz = [",
    "# The parser\n",
    "return self",
    "class A:\n    pass\n\nclass B:\n    pass\n\nclass C:\n",
)
PROMPTS = [load_tokenizer(TARGET).encode(text).ids for text in TEXTS]
PLAIN = SpeculationOptions(enabled=False)
SETTINGS = (
    SamplingParams(1.0),
    SamplingParams(0.8, 40, 0.95, min_p=0.02, repetition_penalty=1.1, frequency_penalty=0.2),
)


def request(
    index: int, options: SpeculationOptions, sampling: SamplingParams = SETTINGS[0]
) -> TokenRequest:
    # A seed uses all 64 bits.
    seeded = replace(sampling, seed=(index + 1) * 0x9E3779B97F4A7C15 % 2**64)
    return TokenRequest(PROMPTS[index], 48, seeded, speculation=options, ignore_eos=True)


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[Client]:
    async with Client(stack.address) as made:
        yield made


async def texts(
    client: Client,
    options: SpeculationOptions,
    sampling: SamplingParams = SETTINGS[0],
    count: int = len(PROMPTS),
) -> list[list[int]]:
    """Return the texts of the first `count` prompts, one request after the other."""
    return [await client.tokens(request(i, options, sampling)) for i in range(count)]


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param(SETTINGS[0], id="plain"),
        pytest.param(SETTINGS[1], id="many settings", marks=pytest.mark.slow),
    ],
)
async def test_a_seed_gives_the_same_text_with_every_set_of_drafters(
    client: Client, sampling: SamplingParams
) -> None:
    plain = [request(i, PLAIN, sampling) for i in range(len(PROMPTS))]
    expected = await asyncio.gather(*(client.tokens(one) for one in plain))
    assert len({tuple(text) for text in expected}) == len(PROMPTS)
    for drafter in ("ngram-1", "model-1", ""):
        options = SpeculationOptions(drafter_id=drafter, always_draft=True)
        assert await texts(client, options, sampling, 1) == expected[:1]
        requests = [request(i, options, sampling) for i in range(len(PROMPTS))]
        found = Answers()
        for chunks in await asyncio.gather(*map(client.generate, requests)):
            found.add(chunks)
        assert found.texts == expected
        assert found.accepted_token_count > 0
