"""Who may become a drafter of a real verifier, and what the verifier remembers of a drafter.

tests/verifier has drafters that lie, err or stall, on an engine with a small model.
"""

import asyncio

import grpc

from outrider.errors import Reason
from outrider.v1 import common_pb2, drafts_pb2
from tests.raw_drafter import RawDrafter
from tests.stack import Client, Stack


async def test_another_tokenizer_is_refused_with_both_fingerprints(stack: Stack) -> None:
    async with (
        Client(stack.address) as client,
        client.drafter("stranger", tokenizer_fingerprint="f00d") as drafter,
    ):
        error = await drafter.error()
        assert await drafter.call.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert error.reason is Reason.TOKENIZER_MISMATCH
        assert "if its setting target names the target" in error.message
        assert error.metadata == {
            "drafter": "f00d",
            "target": (await client.model()).tokenizer_fingerprint,
        }


async def test_only_the_first_message_may_and_must_be_a_hello(stack: Stack) -> None:
    async with Client(stack.address) as client:
        drafter = RawDrafter(client.channel, "rude")
        await drafter.say(drafts=drafts_pb2.DraftBatch())
        assert (await drafter.error()).reason is Reason.PROTOCOL_VIOLATION
        async with client.drafter("twice") as polite:
            assert (await polite.hear()).HasField("welcome")
            await polite.say(hello=drafts_pb2.Hello(drafter_id="twice"))
            assert (await polite.error()).reason is Reason.PROTOCOL_VIOLATION


async def test_a_lost_drafter_stays_listed_and_one_that_drained_does_not(stack: Stack) -> None:
    async with Client(stack.address) as client:
        async with client.drafter("polite") as polite:
            assert (await polite.hear()).HasField("welcome")
            await polite.say(draining=drafts_pb2.Draining(reason="done"))
            await polite.say(draining=drafts_pb2.Draining(reason="a second time"))
            await polite.call.done_writing()
            assert await polite.call.read() == grpc.aio.EOF  # type: ignore[attr-defined]  # grpc-stubs lack it
        placement = common_pb2.Placement(kind="local", host="there")
        async with client.drafter("crashed", placement=placement) as crashed:
            assert (await crashed.hear()).HasField("welcome")
        await asyncio.sleep(0.3)
        known = {info.drafter_id: info.connected for info in (await client.model()).drafters}
    assert "polite" not in known
    assert known["crashed"] is False
