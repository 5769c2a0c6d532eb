"""Random and broken messages at every RPC of a verifier, over real gRPC.

Each call ends with a clear status, a request beside it gets its text, and no page, sequence or
drafter is left.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from itertools import count

import grpc
import pytest
import pytest_asyncio
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from hypothesis import given
from hypothesis import strategies as st

from outrider.internal.v1 import token_streams_pb2
from outrider.process.network import rpc
from outrider.protocol.draft_messages import DraftBatch, Hello, Proposal, Skip
from outrider.protocol.messages import DraftDistribution, SamplingParams, TokenRequest
from outrider.protocol.wire import drafts as wire_drafts
from outrider.protocol.wire.settings import proto_enum
from outrider.v1 import common_pb2, drafts_pb2, verifier_pb2, verifier_pb2_grpc
from tests.hostile_messages import fuzzing, wire
from tests.raw_calls import call_raw, check_clear, methods
from tests.raw_drafter import RawDrafter
from tests.verifier.fake_model import VOCAB, Client, ScriptedDrafter, make_engine
from tests.verifier.served_engine import Verifier, verifier
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

GENERATE = verifier_pb2.GenerateTokensRequest(
    prompt_token_ids=[1, 2], max_tokens=40, sampling=common_pb2.SamplingParams(temperature=0.0)
)
EXPECTED = make_engine()[1].greedy([1, 2], 40)
CANCEL = token_streams_pb2.CancelTokens()
HELLO = Hello("d", "f", "t", 8, frozenset(DraftDistribution))
CHAIN = Proposal(1, 2, [1, 2])
TREE = Proposal(1, 2, [1, 3], [0, 1], draft_seconds=0.1)
DRAFTS = wire_drafts.drafts_to_proto(DraftBatch([CHAIN, TREE], [Skip(2, 2)]))
SAID_BY_DRAFTERS = [
    verifier_pb2.StreamDraftsRequest(hello=wire_drafts.hello_to_proto(HELLO)).SerializeToString(),
    verifier_pb2.StreamDraftsRequest(drafts=DRAFTS).SerializeToString(),
]
VALID: dict[str, list[bytes]] = {
    "GenerateTokens": [GENERATE.SerializeToString()],
    "StreamTokens": [
        token_streams_pb2.StreamTokensRequest(
            requests=[token_streams_pb2.SequenceRequest(call_id=1, **kind)]
        ).SerializeToString()
        for kind in ({"generate": GENERATE}, {"cancel": CANCEL})
    ],
    "StreamDrafts": SAID_BY_DRAFTERS,
}
# Watch is left out, since its calls never end.
METHODS = [
    method
    for method in methods(
        verifier_pb2.DESCRIPTOR,
        token_streams_pb2.DESCRIPTOR,
        health_pb2.DESCRIPTOR,
        reflection_pb2.DESCRIPTOR,
    )
    if method.name != "Watch"
]
REQUESTS = {
    method.name: st.lists(
        wire(GetMessageClass(method.input_type), VALID.get(method.name)),
        min_size=1,
        max_size=4 if method.client_streaming else 1,
    )
    for method in METHODS
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[Verifier]:
    async with verifier() as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def channel(served: Verifier) -> AsyncIterator[grpc.aio.Channel]:
    async with rpc.dial(served.address) as channel:
        yield channel


async def good_text(channel: grpc.aio.Channel) -> list[int]:
    """Return the tokens of a well-formed request."""
    stub = verifier_pb2_grpc.VerifierServiceStub(channel)
    return [token async for chunk in stub.GenerateTokens(GENERATE) for token in chunk.token_ids]


async def until_empty(served: Verifier) -> None:
    """Wait until no sequence, page or drafter is left in the engine, and check its pages."""
    engine = served.engine

    def left() -> tuple[int, int, int]:
        drafters = engine.drafting.roster.connected
        return len(engine.sequences), engine.pool.used_count, len(drafters)

    async def is_empty() -> bool:
        return not any(await served.thread.call(left))

    with suppress(TimeoutError):
        await until(is_empty, timeout_s=10)
    remaining = await served.thread.call(left)
    assert not any(remaining), f"sequences, pages and drafters that are left: {remaining}"
    await served.thread.call(engine.pool.check_integrity)


async def test_the_unchanged_drafts_are_taken() -> None:
    """If valid drafts were refused, changed drafts would never reach a trie."""
    engine, _ = make_engine()
    drafter = ScriptedDrafter(engine)
    for _ in range(2):
        engine.submit(TokenRequest([1, 2], 6, SamplingParams(0.0)), Client())
    engine.drafting.on_drafts(drafter.handle, wire_drafts.drafts_from_proto(DRAFTS, VOCAB))
    engine.drain_inbox()
    assert drafter.error is None
    [first, _] = engine.sequences.values()
    assert first.assignments["scripted"].trie.node_count == 3


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
@fuzzing(25)
@given(data=st.data())
async def test_every_rpc_takes_or_clearly_refuses_any_messages(
    served: Verifier, channel: grpc.aio.Channel, method: MethodDescriptor, data: st.DataObject
) -> None:
    requests = data.draw(REQUESTS[method.name])
    text, _ = await asyncio.gather(good_text(channel), call_raw(channel, method, requests))
    assert text == EXPECTED
    await until_empty(served)


NAMES = count()


def aimed(data: bytes, opened: drafts_pb2.Opened) -> bytes:
    """Return a drafter's message whose small numbers are changed to fit an open sequence.

    Small sequence ids and token ids become valid, and small base lengths at most two too large.
    Without these changes, hardly any message would be about a sequence. Bytes that cannot be parsed
    stay as they are.
    """
    try:
        request = verifier_pb2.StreamDraftsRequest.FromString(data)
    except DecodeError:
        return data
    parts: list[drafts_pb2.Proposal | drafts_pb2.Skip] = [
        *request.drafts.proposals,
        *request.drafts.skips,
    ]
    for part in parts:
        if part.sequence_id <= 12:
            part.sequence_id = opened.sequence_id
        if part.base_length <= 12:
            part.base_length = len(opened.token_ids) + part.base_length % 3
    for proposal in request.drafts.proposals:
        for place, token in enumerate(proposal.token_ids):
            if token <= 12:
                proposal.token_ids[place] = token % VOCAB
    return request.SerializeToString()


async def opened_to(drafter: RawDrafter) -> drafts_pb2.Opened:
    """Return the next sequence that the verifier opens to the drafter."""
    while not (step := (await drafter.hear()).step).opened:
        pass
    return step.opened[0]


async def end(drafter: RawDrafter) -> None:
    """Send nothing more, and read to the end; an error must be clear."""
    with suppress(asyncio.InvalidStateError):
        await drafter.call.done_writing()
    try:
        async with asyncio.timeout(20):
            while await drafter.call.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]  # grpc-stubs lack it
                pass
    except grpc.aio.AioRpcError as failure:
        check_clear(failure)


@fuzzing(60)
@given(st.lists(wire(verifier_pb2.StreamDraftsRequest, SAID_BY_DRAFTERS), min_size=1, max_size=4))
async def test_a_drafter_in_mid_stream_changes_no_text_and_leaves_nothing(
    served: Verifier, channel: grpc.aio.Channel, said: list[bytes]
) -> None:
    distributions = [proto_enum(kind) for kind in DraftDistribution]
    drafter = RawDrafter(channel, f"hostile-{next(NAMES)}", distributions=distributions)
    await drafter.welcomed()
    text = asyncio.create_task(good_text(channel))
    opened = await opened_to(drafter)
    for data in said:
        with suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
            await drafter.send(aimed(data, opened))
    await end(drafter)
    assert await text == EXPECTED
    await until_empty(served)
