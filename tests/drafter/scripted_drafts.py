"""A VerifierService over real gRPC whose side of the draft stream a test scripts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc

from outrider.errors import OutriderError, Reason
from outrider.process import rpc
from outrider.protocol.draft_messages import DraftBatch, Hello, StepBatch
from outrider.protocol.model_info import ModelInfo, Stage
from outrider.protocol.wire import drafts as wire_drafts
from outrider.protocol.wire import model as wire_model
from outrider.v1 import drafts_pb2, verifier_pb2

FINGERPRINT = "f" * 64
READY = ModelInfo("target", Stage.READY, "serving", FINGERPRINT, 4096, 2048, (0,), "float32", "cpu")


class Stream:
    """The verifier's side of one accepted stream.

    `received` gets every message of the drafter, and None when the drafter half-closes.
    """

    def __init__(self, hello: Hello) -> None:
        self.hello = hello
        self.received: asyncio.Queue[DraftBatch | str | None] = asyncio.Queue()
        self.outgoing: asyncio.Queue[StepBatch | str | bytes | OutriderError] = asyncio.Queue()

    async def receive(self) -> DraftBatch | str | None:
        """The drafter's next message: a batch, the reason of a Draining, or None at the end."""
        return await asyncio.wait_for(self.received.get(), 30)

    def send(self, message: StepBatch | str | bytes | OutriderError) -> None:
        """Send a step, a Draining with this reason, or raw bytes; or end the call with an error."""
        self.outgoing.put_nowait(message)


def _serialized(message: Any) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()


class ScriptedVerifier:
    """Serves the model `info` without having one.

    `silent` accepts a stream but never sends Welcome. `stops_reading` reads nothing after the
    Hello. `uds` is a Unix socket to listen on as well.
    """

    def __init__(
        self, *, silent: bool = False, stops_reading: bool = False, uds: Path | None = None
    ) -> None:
        self.info = READY
        self.port = 0
        self.silent = silent
        self.stops_reading = stops_reading
        self.uds = uds
        self.streams: asyncio.Queue[Stream] = asyncio.Queue()
        self.answers: list[bytes] = []
        """Raw messages that GetModel answers first, in place of `info`."""

    async def start(self) -> None:
        """Listen on `port`: a free port at first, the same one again after `stop`."""
        self._server = grpc.aio.server(options=rpc.SERVER_OPTIONS)
        handlers = {
            "GetModel": grpc.unary_unary_rpc_method_handler(
                self.GetModel, verifier_pb2.GetModelRequest.FromString, _serialized
            ),
            "StreamDrafts": grpc.stream_stream_rpc_method_handler(
                self.StreamDrafts, verifier_pb2.StreamDraftsRequest.FromString, _serialized
            ),
        }
        handler = grpc.method_handlers_generic_handler("outrider.v1.VerifierService", handlers)
        self._server.add_generic_rpc_handlers((handler,))
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        if self.uds is not None:
            self._server.add_insecure_port(f"unix:{self.uds}")
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(None)

    async def accepted(self) -> Stream:
        return await asyncio.wait_for(self.streams.get(), 30)

    @rpc.reports_errors
    async def GetModel(
        self, request: verifier_pb2.GetModelRequest, context: Any
    ) -> verifier_pb2.GetModelResponse | bytes:
        if self.answers:
            return self.answers.pop(0)
        return wire_model.model_to_proto(self.info)

    @rpc.reports_errors
    async def StreamDrafts(
        self, request_iterator: AsyncIterator[verifier_pb2.StreamDraftsRequest], context: Any
    ) -> None:
        requests = aiter(request_iterator)
        stream = Stream(wire_drafts.hello_from_proto((await anext(requests)).hello))
        self.streams.put_nowait(stream)
        if self.silent:
            await asyncio.Event().wait()
        if stream.hello.tokenizer_fingerprint != FINGERPRINT:
            theirs = stream.hello.tokenizer_fingerprint
            message = f"the drafter's tokenizer is {theirs}, not {FINGERPRINT}"
            raise OutriderError(Reason.TOKENIZER_MISMATCH, message)
        welcome = drafts_pb2.Welcome(model_id="target", vocab_size=4096, context_length=2048)
        await context.write(verifier_pb2.StreamDraftsResponse(welcome=welcome))
        reader = asyncio.create_task(self._read(stream, requests))
        writer = asyncio.create_task(self._write(stream, context))
        try:
            done, _ = await asyncio.wait([reader, writer], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                await task
        finally:
            reader.cancel()
            writer.cancel()

    async def _read(
        self, stream: Stream, requests: AsyncIterator[verifier_pb2.StreamDraftsRequest]
    ) -> None:
        if self.stops_reading:
            await asyncio.Event().wait()
        async for request in requests:
            if request.WhichOneof("message") == "drafts":
                stream.received.put_nowait(wire_drafts.drafts_from_proto(request.drafts, 4096))
            else:
                stream.received.put_nowait(request.draining.reason)
        stream.received.put_nowait(None)

    async def _write(self, stream: Stream, context: Any) -> None:
        while True:
            message = await stream.outgoing.get()
            if isinstance(message, OutriderError):
                raise message
            if isinstance(message, bytes):
                await context.write(message)
            elif isinstance(message, str):
                draining = drafts_pb2.Draining(reason=message)
                await context.write(verifier_pb2.StreamDraftsResponse(draining=draining))
            else:
                step = wire_drafts.step_to_proto(message)
                await context.write(verifier_pb2.StreamDraftsResponse(step=step))
