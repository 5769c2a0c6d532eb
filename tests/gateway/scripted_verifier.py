"""A VerifierService over real gRPC that plays a test's script, errors and odd chunks included."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from outrider.errors import OutriderError
from outrider.internal.v1 import token_streams_pb2, token_streams_pb2_grpc
from outrider.process.network import rpc
from outrider.process.security.tls import Tls
from outrider.protocol.link_versions import SPOKEN, Versions
from outrider.protocol.messages import (
    FinishReason,
    SpeculationStats,
    TokenChunk,
    TokenRequest,
    TokenSource,
)
from outrider.protocol.model_info import ModelInfo, Stage
from outrider.protocol.wire import model as wire_model
from outrider.protocol.wire import requests as wire_requests
from outrider.v1 import verifier_pb2, verifier_pb2_grpc
from verifier_svc.streams.gateway_streams import GatewayStream, agreed_version

Step = TokenChunk | OutriderError | float
"""A chunk to send, an error to end with, or seconds to wait."""


@dataclass
class Script:
    """The verifier's model and behaviour, and what it has seen. `answer` maps requests to steps."""

    info: ModelInfo
    answer: Callable[[TokenRequest], Iterable[Step]]
    requests: list[TokenRequest] = field(default_factory=list)
    traceparents: list[str] = field(default_factory=list)
    running: int = 0
    cancelled: int = 0
    unreachable: bool = False
    refusal: OutriderError | None = None
    """If set, GetModel answers with this error instead of the model."""
    hangs_up: bool = False
    leaves: bool = False
    """True if each stream must say that the verifier is about to stop."""
    stream_count: int = 0
    message_count: int = 0
    """The number of messages from gateways; each message has one or more requests."""
    versions: Versions | None = SPOKEN
    """The versions of outrider.internal.v1 that it speaks; None if it lacks AgreeVersion."""
    asked_versions: list[Versions] = field(default_factory=list)
    used_versions: list[int] = field(default_factory=list)
    """The version in each message of the gateways' streams."""

    def play(self, *steps: Step) -> None:
        """Answer every request with these steps from now on."""
        self.answer = lambda _: steps


def serve_verifier(servicer: ScriptedVerifier, server: grpc.aio.Server) -> None:
    """Add the servicer to the server as both of a verifier's services."""
    verifier_pb2_grpc.add_VerifierServiceServicer_to_server(servicer, server)
    token_streams_pb2_grpc.add_TokenStreamServiceServicer_to_server(servicer, server)


class ScriptedVerifier(
    verifier_pb2_grpc.VerifierServiceServicer, token_streams_pb2_grpc.TokenStreamServiceServicer
):
    """Plays a script."""

    def __init__(self, script: Script) -> None:
        self.script = script

    async def GetModel(
        self, request: verifier_pb2.GetModelRequest, context: Any
    ) -> verifier_pb2.GetModelResponse:
        if self.script.unreachable:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
        if self.script.refusal is not None:
            raise self.script.refusal
        return wire_model.model_to_proto(self.script.info)

    async def AgreeVersion(
        self, request: token_streams_pb2.AgreeVersionRequest, context: Any
    ) -> token_streams_pb2.AgreeVersionResponse:
        if self.script.versions is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no such method")
            raise AssertionError("aborting raises")
        asked = Versions(request.oldest_version, request.newest_version)
        self.script.asked_versions.append(asked)
        version = agreed_version(asked, self.script.versions, context)
        return token_streams_pb2.AgreeVersionResponse(version=version)

    # The method writes through the context, which the stubs do not support.
    async def StreamTokens(  # type: ignore[override]
        self, request_iterator: AsyncIterator[token_streams_pb2.StreamTokensRequest], context: Any
    ) -> None:
        self.script.stream_count += 1
        versions = self.script.versions or Versions(1, 1)
        requests = self._counted(request_iterator)
        stream = GatewayStream(self._generate, requests, context, versions)
        serving = asyncio.ensure_future(stream.run())
        hung_up = asyncio.ensure_future(self._hang_up(stream))
        try:
            await serving
        finally:
            serving.cancel()
            hung_up.cancel()

    async def _counted(
        self, requests: AsyncIterator[token_streams_pb2.StreamTokensRequest]
    ) -> AsyncIterator[token_streams_pb2.StreamTokensRequest]:
        async for message in requests:
            self.script.message_count += 1
            self.script.used_versions.append(message.version)
            yield message

    async def _hang_up(self, stream: GatewayStream) -> None:
        # Tests set plain flags, so there is no event to wait for.
        while not self.script.hangs_up:
            if self.script.leaves:
                self.script.leaves = False
                stream.say_draining()
            await asyncio.sleep(0.02)
        self.script.hangs_up = False
        stream.end()

    async def _generate(
        self, request: verifier_pb2.GenerateTokensRequest, traceparent: str
    ) -> AsyncGenerator[verifier_pb2.GenerateTokensResponse, None]:
        script = self.script
        info = script.info
        asked = wire_requests.request_from_proto(
            request, vocab_size=info.vocab_size, context_length=info.context_length
        )
        script.requests.append(asked)
        if traceparent:
            script.traceparents.append(traceparent)
        script.running += 1
        try:
            for step in script.answer(asked):
                if isinstance(step, OutriderError):
                    raise step
                if isinstance(step, float):
                    await asyncio.sleep(step)
                else:
                    yield wire_requests.chunk_to_proto(step)
        except (asyncio.CancelledError, GeneratorExit):
            script.cancelled += 1
            raise
        finally:
            script.running -= 1


@asynccontextmanager
async def serving(script: Script, tls: Tls | None = None) -> AsyncIterator[str]:
    """Serve a verifier that plays the script during the block; yield its address."""
    server = rpc.Server("outrider.v1.VerifierService")
    # The stubs call the class abstract, but methods that it lacks answer UNIMPLEMENTED.
    verifier = ScriptedVerifier(script)  # type: ignore[abstract]
    serve_verifier(verifier, server.grpc)
    [port] = await server.start("127.0.0.1:0", tls=tls)
    yield f"127.0.0.1:{port}"
    await server.stop(0)


def plain(token_ids: list[int]) -> TokenChunk:
    """Return a chunk of plainly decoded tokens."""
    return TokenChunk(token_ids, [TokenSource.PLAIN] * len(token_ids))


def last(
    token_ids: list[int],
    reason: FinishReason,
    stats: SpeculationStats | None = None,
    cached: int = 0,
) -> TokenChunk:
    """Return the chunk that ends a sequence."""
    return TokenChunk(
        token_ids,
        [TokenSource.PLAIN] * len(token_ids),
        finish_reason=reason,
        stats=stats or SpeculationStats(forward_count=1),
        cached_token_count=cached,
    )


def ready(fingerprint: str, vocab_size: int = 4096, **changes: Any) -> ModelInfo:
    """Return a ready model with the limits of the bundled model."""
    known: dict[str, Any] = {
        "model_id": "models/target",
        "stage": Stage.READY,
        "stage_detail": "serving",
        "tokenizer_fingerprint": fingerprint,
        "vocab_size": vocab_size,
        "context_length": 2048,
        "eos_token_ids": (0, 3),
        "dtype": "float32",
        "device": "cpu",
        "max_draft_tokens": 4,
    }
    return ModelInfo(**known | changes)
