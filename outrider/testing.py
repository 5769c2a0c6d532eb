"""A verifier without a model, over real gRPC, for tests of drafters in any language.

verifier = ScriptedVerifier(model)
await verifier.start()
# Start a drafter with the verifier's port; then:
stream = await verifier.streams.get()
stream.send(StreamDraftsResponse(step=StepBatch(opened=[...])))
answer = await stream.requests.get()
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc
from google.protobuf.message import Message
from google.rpc import status_pb2
from grpc_status import rpc_status

from outrider.errors import OutriderError, Reason
from outrider.process.network import rpc
from outrider.process.security.credentials import peer_of
from outrider.process.security.roles import Peer
from outrider.process.security.tls import Tls
from outrider.process.tasks import until_first_end
from outrider.v1 import drafts_pb2, verifier_pb2

SERVICE = "outrider.v1.VerifierService"


class DraftStream:
    """The verifier's side of one drafter's stream, after its Hello."""

    def __init__(self, hello: drafts_pb2.Hello) -> None:
        self.hello = hello
        self.requests: asyncio.Queue[verifier_pb2.StreamDraftsRequest | None] = asyncio.Queue()
        """The drafter's messages; None when it half-closes."""
        self.ended = False
        self._outbox: asyncio.Queue[Message | bytes | None] = asyncio.Queue()

    def send(self, message: Message | bytes) -> None:
        """Send a StreamDraftsResponse, or any bytes in its place."""
        self._outbox.put_nowait(message)

    def end(self, status: status_pb2.Status | None) -> None:
        """End the stream with this status; with None, end it as a killed verifier would."""
        self._outbox.put_nowait(status)

    def heard(self, request: verifier_pb2.StreamDraftsRequest | None) -> None:
        """Take a message of the drafter; None means that it half-closed."""
        self.requests.put_nowait(request)

    def close(self) -> None:
        """Mark the stream as ended."""
        self.ended = True

    async def _read(self, requests: AsyncIterator[verifier_pb2.StreamDraftsRequest]) -> None:
        async for request in requests:
            self.heard(request)
        self.heard(None)

    async def _write(self, context: Any) -> None:
        """Send queued messages until `end`; then end the call with the status that `end` got."""
        while (message := await self._outbox.get()) is not None:
            if isinstance(message, status_pb2.Status):
                await context.abort_with_status(rpc_status.to_status(message))
            await context.write(message)
        await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")


class ScriptedVerifier:
    """GetModel returns `model`, and each drafter gets a Welcome; a test sends all other messages.

    If `silent`, it accepts streams but never sends Welcome. If `stops_reading`, it reads nothing
    after a Hello.
    """

    def __init__(
        self,
        model: verifier_pb2.GetModelResponse,
        *,
        silent: bool = False,
        stops_reading: bool = False,
    ) -> None:
        self.model = model
        self.silent = silent
        self.stops_reading = stops_reading
        self.answers: list[bytes] = []
        """Raw messages that GetModel returns first, in place of `model`."""
        self.refusal: status_pb2.Status | None = None
        """While a refusal is set, each new stream ends with it."""
        self.refuses_every_call = False
        """True if GetModel ends with the refusal too, as verifiers do for a wrong certificate."""
        self.attempts: list[float] = []
        """Times, by time.monotonic, when streams came and when calls of GetModel were refused."""
        self.streams: asyncio.Queue[DraftStream] = asyncio.Queue()
        self.port = 0
        self._server: rpc.Server | None = None

    async def start(self, *sockets: str, tls: Tls | None = None) -> None:
        """Listen on `port`, and on Unix sockets (`unix:/path`).

        The port is a free port at first, and the same port again after `stop`.
        """
        self._server = rpc.Server(SERVICE)
        self._server.grpc.add_generic_rpc_handlers((self._handler(),))
        address = f"127.0.0.1:{self.port}"
        self.port = (await self._server.start(address, *sockets, tls=tls))[0]

    async def stop(self) -> None:
        """Cut all connections."""
        if self._server is not None:
            await self._server.stop(0)
            self._server = None

    def stream_of(self, hello: drafts_pb2.Hello) -> DraftStream:
        """Make the stream of a drafter that said this Hello."""
        return DraftStream(hello)

    def feature_width(self, hello: drafts_pb2.Hello) -> int:
        """Return how many numbers a feature has for this drafter; 0 if it gets no features."""
        return 0

    def check_first(
        self, first: verifier_pb2.StreamDraftsRequest | None, peer: Peer | None
    ) -> None:
        """Check a stream's first message, None if no message came. May raise OutriderError."""
        if first is not None and first.hello.tokenizer_fingerprint != self._fingerprint:
            theirs = first.hello.tokenizer_fingerprint
            message = f"the drafter's tokenizer is {theirs}, not {self._fingerprint}"
            raise OutriderError(Reason.TOKENIZER_MISMATCH, message)

    @property
    def _fingerprint(self) -> str:
        return self.model.tokenizer_fingerprint

    def _handler(self) -> grpc.GenericRpcHandler[Any, Any]:
        methods = {
            "GetModel": grpc.unary_unary_rpc_method_handler(
                self._get_model, verifier_pb2.GetModelRequest.FromString, _serialized
            ),
            "GenerateTokens": grpc.unary_unary_rpc_method_handler(
                self._generate_tokens, verifier_pb2.GenerateTokensRequest.FromString, _serialized
            ),
            "StreamDrafts": grpc.stream_stream_rpc_method_handler(
                self._stream_drafts, verifier_pb2.StreamDraftsRequest.FromString, _serialized
            ),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def _get_model(self, request: Any, context: Any) -> Message | bytes:
        if self.refuses_every_call:
            self.attempts.append(time.monotonic())
            await self._refuse(context)
        return self.answers.pop(0) if self.answers else self.model

    async def _generate_tokens(self, request: Any, context: Any) -> Message:
        raise OutriderError(Reason.UNSUPPORTED_PARAMETER, "a scripted verifier has no model")

    async def _stream_drafts(
        self, request_iterator: AsyncIterator[verifier_pb2.StreamDraftsRequest], context: Any
    ) -> None:
        arrived = time.monotonic()
        requests = aiter(request_iterator)
        first = None
        with suppress(TimeoutError, StopAsyncIteration):
            async with asyncio.timeout(10):
                first = await anext(requests)
        self.check_first(first, peer_of(context))
        # Count the attempt only now: a test that has counted enough attempts may kill the drafter.
        self.attempts.append(arrived)
        if first is None:
            return
        await self._refuse(context)
        stream = self.stream_of(first.hello)
        if not self.silent:
            welcome = self._welcome(self.feature_width(first.hello))
            stream.send(verifier_pb2.StreamDraftsResponse(welcome=welcome))
        self.streams.put_nowait(stream)
        if self.silent:
            await asyncio.Event().wait()
        works = [stream._write(context)]
        if not self.stops_reading:
            works.append(stream._read(requests))
        try:
            await until_first_end(*works)
        finally:
            stream.close()

    def _welcome(self, feature_width: int) -> drafts_pb2.Welcome:
        return drafts_pb2.Welcome(
            model_id=self.model.model_id,
            vocab_size=self.model.vocab_size,
            context_length=self.model.context_length,
            capabilities=[drafts_pb2.CAPABILITY_FEATURES] if feature_width else [],
            feature_width=feature_width,
        )

    async def _refuse(self, context: Any) -> None:
        """End the call with the refusal that the test has set, if any."""
        if self.refusal is not None:
            await context.abort_with_status(rpc_status.to_status(self.refusal))


def _serialized(message: Message | bytes) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()
