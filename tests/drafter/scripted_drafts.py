"""A VerifierService over real gRPC that speaks the verifier's side of the draft stream as a test tells it to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc

from outrider.errors import OutriderError, Reason
from outrider.messages import DraftBatch, Hello, StepBatch
from outrider.model_info import ModelInfo, Stage
from outrider.process import rpc
from outrider.v1 import drafts_pb2, verifier_pb2
from outrider.wire import drafts as wire_drafts
from outrider.wire import model as wire_model

FINGERPRINT = "f" * 64
READY = ModelInfo("target", Stage.READY, "serving", FINGERPRINT, 4096, 2048, (0,), "float32", "cpu")


class Stream:
    """One accepted stream, from the verifier's side. `heard` gets every message of the drafter's; None once it has half-closed."""

    def __init__(self, hello: Hello) -> None:
        self.hello = hello
        self.heard: asyncio.Queue[DraftBatch | str | None] = asyncio.Queue()
        self.says: asyncio.Queue[StepBatch | str | bytes | OutriderError] = asyncio.Queue()

    async def hear(self) -> DraftBatch | str | None:
        return await asyncio.wait_for(self.heard.get(), 5)

    def say(self, message: StepBatch | str | bytes | OutriderError) -> None:
        """A step, a reason for draining, any bytes, or the error to end the call with."""
        self.says.put_nowait(message)


def _serialized(message: Any) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()


class ScriptedVerifier:
    """`info` is what it serves; `silent` accepts a stream but never welcomes it; `deaf` stops reading after the Hello; `uds` is a
    socket that it listens on as well.
    """

    def __init__(
        self, *, silent: bool = False, deaf: bool = False, uds: Path | None = None
    ) -> None:
        self.info = READY
        self.port = 0
        self.silent = silent
        self.deaf = deaf
        self.uds = uds
        self.streams: asyncio.Queue[Stream] = asyncio.Queue()
        self.answers: list[bytes] = []
        """What GetModel answers first, in place of `info`."""

    async def start(self) -> None:
        """Listen on `port`: any at first, the same one after `stop`."""
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
        return await asyncio.wait_for(self.streams.get(), 10)

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
            raise OutriderError(
                Reason.TOKENIZER_MISMATCH,
                f"the drafter's tokenizer is {stream.hello.tokenizer_fingerprint}, not {FINGERPRINT}",
            )
        welcome = drafts_pb2.Welcome(model_id="target", vocab_size=4096, context_length=2048)
        await context.write(verifier_pb2.StreamDraftsResponse(welcome=welcome))
        listening = asyncio.create_task(
            asyncio.Event().wait() if self.deaf else self._listen(stream, requests)
        )
        speaking = asyncio.create_task(self._speak(stream, context))
        try:
            done, _ = await asyncio.wait([listening, speaking], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                await task
        finally:
            listening.cancel()
            speaking.cancel()

    async def _listen(
        self, stream: Stream, requests: AsyncIterator[verifier_pb2.StreamDraftsRequest]
    ) -> None:
        async for request in requests:
            if request.WhichOneof("message") == "drafts":
                stream.heard.put_nowait(wire_drafts.drafts_from_proto(request.drafts, 4096))
            else:
                stream.heard.put_nowait(request.draining.reason)
        stream.heard.put_nowait(None)

    async def _speak(self, stream: Stream, context: Any) -> None:
        while True:
            message = await stream.says.get()
            if isinstance(message, OutriderError):
                raise message
            if isinstance(message, bytes):
                await context.write(message)
            elif isinstance(message, str):
                await context.write(
                    verifier_pb2.StreamDraftsResponse(draining=drafts_pb2.Draining(reason=message))
                )
            else:
                await context.write(
                    verifier_pb2.StreamDraftsResponse(step=wire_drafts.step_to_proto(message))
                )
