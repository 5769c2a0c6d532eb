"""The scripted verifier of `outrider.testing`, with messages of the protocol's own classes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from google.protobuf.message import Message

from outrider import testing
from outrider.errors import OutriderError
from outrider.process.network import rpc_errors
from outrider.protocol.draft_messages import DraftBatch, Hello, Opened, StepBatch
from outrider.protocol.model_info import ModelInfo, Stage
from outrider.protocol.wire import drafts as wire_drafts
from outrider.protocol.wire import model as wire_model
from outrider.v1 import drafts_pb2, verifier_pb2

FINGERPRINT = "f" * 64
READY = ModelInfo("target", Stage.READY, "serving", FINGERPRINT, 4096, 2048, (0,), "float32", "cpu")


class Stream(testing.DraftStream):
    """The verifier's side of one accepted stream."""

    @property
    def said(self) -> Hello:
        """Return the drafter's Hello."""
        return wire_drafts.hello_from_proto(self.hello)

    async def receive(self) -> DraftBatch | str | None:
        """Return the drafter's next message: a batch, a Draining's reason, or None at the end."""
        request = await asyncio.wait_for(self.requests.get(), 30)
        if request is None:
            return None
        if request.WhichOneof("message") == "drafts":
            return wire_drafts.drafts_from_proto(request.drafts, 4096)
        return str(request.draining.reason)

    async def drafted(self, opened: Opened) -> list[int]:
        """Open a sequence, and return the guesses of the next message's only proposal."""
        self.send(StepBatch(opened=[opened]))
        batch = await self.receive()
        assert isinstance(batch, DraftBatch)
        [proposal] = batch.proposals
        assert proposal.sequence_id == opened.sequence_id
        return proposal.token_ids

    def send(self, message: Message | StepBatch | str | bytes | OutriderError) -> None:
        """Send a message.

        A text is sent as the reason of a Draining, and an error ends the call.
        """
        if isinstance(message, OutriderError):
            self.end(rpc_errors.status_of(message))
        elif isinstance(message, str):
            draining = drafts_pb2.Draining(reason=message)
            super().send(verifier_pb2.StreamDraftsResponse(draining=draining))
        elif isinstance(message, StepBatch):
            step = wire_drafts.step_to_proto(message)
            super().send(verifier_pb2.StreamDraftsResponse(step=step))
        else:
            super().send(message)


class ScriptedVerifier(testing.ScriptedVerifier):
    """A verifier that claims to serve the model `info`."""

    def __init__(self, info: ModelInfo = READY, **how: Any) -> None:
        super().__init__(wire_model.model_to_proto(info), **how)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def serve(self, info: ModelInfo) -> None:
        """Serve another model from now on."""
        self.model = wire_model.model_to_proto(info)

    def stream_of(self, hello: drafts_pb2.Hello) -> Stream:
        return Stream(hello)

    async def accepted(self) -> Stream:
        stream = await asyncio.wait_for(self.streams.get(), 30)
        assert isinstance(stream, Stream)
        return stream


@asynccontextmanager
async def serving(verifier: ScriptedVerifier, address: str = "") -> AsyncIterator[ScriptedVerifier]:
    """Serve during the block, on a free port unless an address is given."""
    await verifier.start(*[address] * bool(address))
    try:
        yield verifier
    finally:
        await verifier.stop()
