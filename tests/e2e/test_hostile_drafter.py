"""A drafter that lies, errs or stalls gets a clear error and changes no request's text."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest
from raw_drafter import RawDrafter, dialled  # lies beside this file
from stack import Client, Stack

from outrider.errors import OutriderError, Reason
from outrider.protocol.messages import SamplingParams, SpeculationOptions, TokenRequest
from outrider.v1 import common_pb2, drafts_pb2

GREEDY = SamplingParams(temperature=0.0)
PROMPT = list(range(40, 70))


@asynccontextmanager
async def a_request(client: Client, drafter: str) -> AsyncIterator[None]:
    """A long request with this drafter; its text must equal plain decoding's."""
    options = SpeculationOptions(drafter_id=drafter)
    request = TokenRequest(PROMPT, 300, GREEDY, ignore_eos=True, speculation=options)
    without = replace(request, speculation=SpeculationOptions(enabled=False))
    plain = asyncio.create_task(client.tokens(without))
    task = asyncio.create_task(client.tokens(request))
    try:
        yield
    finally:
        assert await task == await plain


def distribution(ids: list[int], probabilities: list[float]) -> drafts_pb2.SparseDistribution:
    return drafts_pb2.SparseDistribution(token_ids=ids, probabilities=probabilities)


BAD_PROPOSALS: dict[str, tuple[dict[str, Any], str, str]] = {
    "an id out of range": (
        {"token_ids": [4096]},
        "drafts.proposals[0].token_ids",
        r"must be in \[0, 4096\), not 4096",
    ),
    "a proposed token of probability zero": (
        {"token_ids": [5], "distributions": [distribution([5, 6], [0.0, 1.0])]},
        "drafts.proposals[0].distributions[0]",
        "must give the proposed token 5 a probability above 0",
    ),
}


@pytest.mark.parametrize("kind", BAD_PROPOSALS)
async def test_a_malformed_proposal_ends_only_its_own_stream(stack: Stack, kind: str) -> None:
    fields, field, message = BAD_PROPOSALS[kind]
    name = kind.replace(" ", "-")
    async with Client(stack.address) as client, dialled(client, name) as drafter:
        assert (await drafter.hear()).HasField("welcome")
        async with a_request(client, name):
            error = await drafter.insist(**fields)
    assert (error.reason, error.field) == (Reason.PROTOCOL_VIOLATION, field)
    with pytest.raises(OutriderError, match=message):
        raise error


async def test_another_tokenizer_is_refused_with_both_fingerprints(stack: Stack) -> None:
    async with (
        Client(stack.address) as client,
        dialled(client, "stranger", tokenizer_fingerprint="f00d") as drafter,
    ):
        error = await drafter.error()
        assert await drafter.call.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert error.reason is Reason.TOKENIZER_MISMATCH
        assert error.metadata == {
            "drafter": "f00d",
            "target": (await client.model()).tokenizer_fingerprint,
        }


async def test_only_the_first_message_may_and_must_be_a_hello(stack: Stack) -> None:
    async with Client(stack.address) as client:
        drafter = RawDrafter(client.stub.StreamDrafts())
        await drafter.say(drafts=drafts_pb2.DraftBatch())
        assert (await drafter.error()).reason is Reason.PROTOCOL_VIOLATION
        async with dialled(client, "twice") as polite:
            assert (await polite.hear()).HasField("welcome")
            await polite.say(hello=drafts_pb2.Hello(drafter_id="twice"))
            assert (await polite.error()).reason is Reason.PROTOCOL_VIOLATION


async def test_a_drafter_that_never_answers_does_not_block_requests(stack: Stack) -> None:
    async with Client(stack.address) as client, dialled(client, "mute") as drafter:
        assert (await drafter.hear()).HasField("welcome")
        async with asyncio.timeout(30), a_request(client, "mute"):
            pass


async def test_a_lost_drafter_stays_listed_and_one_that_drained_does_not(stack: Stack) -> None:
    async with Client(stack.address) as client:
        async with dialled(client, "polite") as polite:
            assert (await polite.hear()).HasField("welcome")
            await polite.say(draining=drafts_pb2.Draining(reason="done"))
            await polite.say(draining=drafts_pb2.Draining(reason="a second time"))
            await polite.call.done_writing()
            assert await polite.call.read() == grpc.aio.EOF
        placement = common_pb2.Placement(kind="local", host="there")
        async with dialled(client, "crashed", placement=placement) as crashed:
            assert (await crashed.hear()).HasField("welcome")
        await asyncio.sleep(0.3)
        known = {info.drafter_id: info.connected for info in (await client.model()).drafters}
    assert "polite" not in known
    assert known["crashed"] is False
