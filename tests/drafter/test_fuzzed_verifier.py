"""The drafter against a verifier that sends random and broken messages, over real gRPC.

The drafter follows or leaves each stream, and drafts for a well-formed sequence afterwards.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import count

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from outrider.drafter import grpc_transport
from outrider.protocol.draft_messages import (
    Closed,
    DraftBatch,
    Proposal,
    StepBatch,
    Verdict,
    Window,
)
from outrider.protocol.wire import drafts as wire_drafts
from outrider.protocol.wire import model as wire_model
from outrider.v1 import drafts_pb2, verifier_pb2
from tests.drafter.counting_drafter import Drafter, opened, running
from tests.drafter.scripted_drafts import READY, ScriptedVerifier, Stream, serving
from tests.hostile_messages import fuzzing, wire

pytestmark = pytest.mark.asyncio(loop_scope="module")

Message = verifier_pb2.StreamDraftsResponse
STEPS = [
    StepBatch([opened(1, (10, 11, 12))]),
    StepBatch(
        [opened(2)],
        verdicts=[Verdict(1, 4, [13], 1, 2), Verdict(2, 3, [12], 0, 2, Window(8, 4))],
    ),
    StepBatch(closed=[Closed(1), Closed(2)]),
]
SAID = [Message(step=wire_drafts.step_to_proto(step)).SerializeToString() for step in STEPS] + [
    Message(welcome=drafts_pb2.Welcome(model_id="other", vocab_size=1)).SerializeToString(),
    Message(draining=drafts_pb2.Draining(reason="over")).SerializeToString(),
]
MODEL = wire_model.model_to_proto(READY).SerializeToString()
UNREADABLE = b"\xff" * 30
IDS = count(10**12)


@dataclass
class Site:
    """A drafter, its verifier, and the verifier's side of the drafter's newest stream."""

    drafter: Drafter
    verifier: ScriptedVerifier
    stream: Stream

    def say(self, data: bytes) -> None:
        self.stream.send(data)

    async def check_drafting(self) -> None:
        """Check that the drafter drafts for a well-formed sequence, on this or a later stream."""
        while True:
            drafted = asyncio.ensure_future(self._drafted(self.stream))
            redialled = asyncio.ensure_future(self.verifier.streams.get())
            await asyncio.wait({drafted, redialled}, return_when=asyncio.FIRST_COMPLETED)
            if not redialled.done():
                redialled.cancel()
                return await drafted
            drafted.cancel()
            newest = redialled.result()
            assert isinstance(newest, Stream)
            self.stream = newest

    async def _drafted(self, stream: Stream) -> None:
        """Open a sequence, wait for its proposal and close it."""
        sequence_id = next(IDS)
        wanted = Proposal(sequence_id, 2, [12, 13])
        stream.send(StepBatch(opened=[opened(sequence_id)]))
        while True:
            batch = await stream.receive()
            if isinstance(batch, DraftBatch) and wanted in batch.proposals:
                break
        stream.send(StepBatch(closed=[Closed(sequence_id)]))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site() -> AsyncIterator[Site]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grpc_transport, "_POLL_LOADING_S", 0.0)
        async with serving(ScriptedVerifier()) as verifier:
            drafter = Drafter(verifier.port)
            drafter.redial_at_once()
            async with running(drafter) as task:
                yield Site(drafter, verifier, await verifier.accepted())
                assert not task.done()


@fuzzing(120)
@given(st.lists(wire(Message, SAID), min_size=1, max_size=4))
async def test_after_any_messages_a_drafter_drafts_for_a_good_sequence(
    site: Site, said: list[bytes]
) -> None:
    for data in said:
        site.say(data)
    await site.check_drafting()


@fuzzing(40)
@given(st.lists(wire(verifier_pb2.GetModelResponse, [MODEL]), min_size=1, max_size=3))
async def test_after_any_models_a_drafter_asks_again_and_drafts(
    site: Site, answers: list[bytes]
) -> None:
    site.verifier.answers = answers
    site.say(UNREADABLE)
    await site.check_drafting()
