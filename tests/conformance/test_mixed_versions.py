"""A verifier of this version serves drafters of older and newer ones; texts stay as they are."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress

import pytest
from other_versions import OtherDrafter
from stack import Client, Stack, running

from outrider.protocol.messages import SamplingParams, SpeculationOptions, TokenRequest

GREEDY = SamplingParams(temperature=0.0)
SEEDED = SamplingParams(temperature=0.8, seed=7)
# Texts that repeat themselves, so that the drafters have something to guess.
PROMPTS = [[5, 6, 7, 8, 9] * 8, [100 + i % 11 for i in range(60)], [3, 4, 3, 9] * 10]
TOKENS = 48


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with running(Stack("--always-draft")) as stack:
        yield stack


async def connected(client: Client, family: str) -> None:
    """Wait until a drafter of the family is connected."""
    while True:
        if any(one.family == family for one in (await client.model()).drafters):
            return
        await asyncio.sleep(0.05)


async def texts(client: Client, options: SpeculationOptions) -> tuple[list[list[int]], int]:
    """Three greedy texts and three seeded ones, and the number of accepted tokens."""
    written = []
    accepted = 0
    for sampling in (GREEDY, SEEDED):
        for prompt in PROMPTS:
            request = TokenRequest(prompt, TOKENS, sampling, speculation=options, ignore_eos=True)
            chunks = await client.generate(request)
            written.append([token for chunk in chunks for token in chunk.token_ids])
            assert chunks[-1].stats is not None
            accepted += chunks[-1].stats.accepted_token_count
    return written, accepted


@pytest.mark.slow  # It starts a verifier.
@pytest.mark.parametrize("version", ["older", "newer"])
async def test_a_drafter_of_another_version_changes_no_text(stack: Stack, version: str) -> None:
    async with Client(stack.address) as client:
        expected, _ = await texts(client, SpeculationOptions(enabled=False))
        model = await client.model()
        drafter = OtherDrafter(stack.address, version, model.tokenizer_fingerprint)
        drafting = asyncio.create_task(drafter.run())
        try:
            async with asyncio.timeout(30):
                await connected(client, version)
            written, accepted = await texts(client, SpeculationOptions(drafter_family=version))
            # A verifier that could not read a message would have ended the stream.
            assert not drafting.done(), drafting.exception()
        finally:
            drafting.cancel()
            with suppress(asyncio.CancelledError):
                await drafting
    assert written == expected
    assert accepted > 20
