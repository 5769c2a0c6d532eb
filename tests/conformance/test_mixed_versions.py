"""Drafters, gateways and verifiers of older and newer versions change no text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

import grpc
import pytest

from outrider.errors import Reason
from outrider.process.network import rpc_errors
from outrider.protocol.messages import SamplingParams, SpeculationOptions
from tests.conformance.other_versions import Part, Version, relaying
from tests.stack import Answers, Client, Process, Stack, running

GREEDY = SamplingParams(temperature=0.0)
SEEDED = SamplingParams(temperature=0.8, seed=7)
# Texts that repeat themselves, so that the drafters have something to guess.
PROMPTS = [[5, 6, 7, 8, 9] * 8, [100 + i % 11 for i in range(60)], [3, 4, 3, 9] * 10]


async def answers(client: Client, options: SpeculationOptions) -> list[Answers]:
    """Return three greedy answers and three seeded ones."""
    return [await client.answers(PROMPTS, each, options) for each in (GREEDY, SEEDED)]


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with running(Stack("--always-draft")) as stack:
        yield stack


@pytest.mark.slow  # This test starts a verifier.
@pytest.mark.parametrize("version", get_args(Version))
@pytest.mark.parametrize("part", get_args(Part))
async def test_a_part_of_another_version_changes_no_text(
    stack: Stack, version: Version, part: Part
) -> None:
    """The verifier refuses a newer gateway's request: its unknown field could change the output."""
    name = f"{version}-{part}"
    async with Client(stack.address) as near, relaying(stack.address, version, part) as relay:
        expected = await answers(near, SpeculationOptions(enabled=False))
        where = stack.address if part == "gateway" else relay
        with Process("drafter_svc", "--family", "ngram", "--verifier", where, "--id", name):
            await near.connected(name)
            async with Client(stack.address if part == "drafter" else relay) as caller:
                if name == "newer-gateway":
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await answers(caller, SpeculationOptions())
                    assert rpc_errors.error_of(caught.value).reason is Reason.UNKNOWN_PARAMETER
                    return
                found = await answers(caller, SpeculationOptions(drafter_id=name))
        # The verifier did not drop the drafter for an unreadable message.
        assert "PROTOCOL" not in stack.verifier.output()
    assert [each.texts for each in found] == [each.texts for each in expected]
    assert sum(each.accepted_token_count for each in found) > 20
