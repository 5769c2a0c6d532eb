"""Drafters, gateways and verifiers of older and newer versions: texts stay as they are."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import get_args

import grpc
import pytest
from other_versions import Part, Version, relaying
from stack import Client, Process, Stack, running

from outrider.errors import Reason
from outrider.process import rpc
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


async def connected(client: Client, drafter_id: str) -> None:
    """Wait until the drafter is connected."""
    while True:
        drafters = (await client.model()).drafters
        if any(one.connected and one.drafter_id == drafter_id for one in drafters):
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
@pytest.mark.parametrize("version", get_args(Version))
@pytest.mark.parametrize("part", get_args(Part))
async def test_a_part_of_another_version_changes_no_text(
    stack: Stack, version: Version, part: Part
) -> None:
    """A newer gateway's field could change the output, so the verifier refuses the request."""
    name = f"{version}-{part}"
    async with Client(stack.address) as near, relaying(stack.address, version, part) as relay:
        expected, _ = await texts(near, SpeculationOptions(enabled=False))
        where = stack.address if part == "gateway" else relay
        drafter = Process("drafter_svc", "--family", "ngram", "--verifier", where, "--id", name)
        try:
            async with asyncio.timeout(30):
                await connected(near, name)
            async with Client(stack.address if part == "drafter" else relay) as caller:
                if name == "newer-gateway":
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await texts(caller, SpeculationOptions())
                    assert rpc.error_of(caught.value).reason is Reason.UNKNOWN_PARAMETER
                    return
                written, accepted = await texts(caller, SpeculationOptions(drafter_id=name))
        finally:
            drafter.stop()
            drafter.log.close()
        # The drafter was not dropped for a message that could not be read.
        assert "PROTOCOL" not in stack.verifier.output()
    assert written == expected
    assert accepted > 20
