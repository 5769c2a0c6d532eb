"""VerifierService: parses requests, submits them to the engine and streams the engine's chunks.

The service keeps the verifier's stage (loading, ready, draining); it does not own the model.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any

import grpc

from outrider.errors import OutriderError, Reason
from outrider.grammar.backends import TextMatcher
from outrider.grammar.compiler import GrammarCompiler
from outrider.internal.v1 import token_streams_pb2, token_streams_pb2_grpc
from outrider.process.clock import Clock, monotonic
from outrider.process.network.read_ahead import ReadAhead, unread_error
from outrider.process.network.rpc import Server
from outrider.process.observability.request_id import HEADER, request_id
from outrider.process.security.credentials import peer_of
from outrider.process.tasks import watch
from outrider.protocol import link_versions
from outrider.protocol.messages import TokenChunk, TokenRequest
from outrider.protocol.model_info import DrafterInfo, Load, ModelInfo, Stage
from outrider.protocol.wire import model as wire_model
from outrider.protocol.wire import requests as wire_requests
from outrider.v1 import verifier_pb2, verifier_pb2_grpc
from verifier_svc.engine.engine_thread import EngineThread
from verifier_svc.engine.served import DraftingEngine, ServedEngine
from verifier_svc.state.sequence import Sequence
from verifier_svc.streams.drafter_streams import DrafterStream
from verifier_svc.streams.gateway_streams import GatewayStream, agreed_version
from verifier_svc.streams.sequence_log import ServedSequence

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
_Answer = tuple[tuple[DrafterInfo, ...], Load | None]
# Seconds for which GetModel and a drain wait for a step to end. After that, GetModel answers with
# the drafters and the load that the engine reported last.
_ANSWER_S = 0.25
# A step that takes longer than this means that the engine hangs.
_MAX_STEP_S = 60.0
_HEALTH_POLL_S = 5.0
# A caller of GenerateTokens that has read nothing for this long gets an error. A gateway has a
# setting of its own for its clients.
MOST_UNREAD_S = 60.0
_NEVER_S = 1e9
JOIN_S = 10.0
"""For this many seconds after it became ready, a verifier holds requests that name a drafter that
has not joined. Drafters that start together with the verifier learn later than its clients do that
it is ready."""
_JOIN_POLL_S = 0.1
_Chunks = ReadAhead[TokenChunk | OutriderError]
"""The chunks of one sequence; an error ends them."""


class VerifierServicer(
    verifier_pb2_grpc.VerifierServiceServicer, token_streams_pb2_grpc.TokenStreamServiceServicer
):
    """Answers GetModel and AgreeVersion from the start, and other calls after `serve`.

    After `serve_drafters`, it answers drafters but no requests.
    """

    def __init__(self, model_id: str, *aliases: str, clock: Clock = monotonic) -> None:
        self._clock = clock
        self.info = ModelInfo(model_id, Stage.LOADING, "starting", aliases=aliases)
        self.versions = link_versions.SPOKEN
        """The versions of outrider.internal.v1 that gateways may use."""
        self._engine: EngineThread[DraftingEngine] | None = None
        # The same engine, if it takes requests.
        self._serving: EngineThread[ServedEngine] | None = None
        self._grammars: GrammarCompiler | None = None
        self._join_until = 0.0
        self._streams: set[DrafterStream] = set()
        self._caller_streams: set[GatewayStream] = set()
        # The query that the engine has not answered yet, and the engine's last answer.
        self._query: asyncio.Future[_Answer] | None = None
        self._query_began = 0.0
        self._answer: _Answer = ((), None)
        self._idle = asyncio.Event()
        self._idle.set()
        self._active = 0

    def report(self, stage: Stage, detail: str) -> None:
        """Set the stage that GetModel reports."""
        self.info = replace(self.info, stage=stage, stage_detail=detail)

    def serve(
        self,
        engine: EngineThread[ServedEngine],
        info: ModelInfo,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        """Start to accept requests and drafters.

        Without `grammars`, requests with a grammar are refused.
        """
        self._serving = engine
        self._grammars = grammars
        self._join_until = self._clock() + JOIN_S
        self.serve_drafters(engine, info)

    def serve_drafters(self, engine: EngineThread[DraftingEngine], info: ModelInfo) -> None:
        """Start to accept drafters. Requests are refused until `serve` is called."""
        self._engine = engine
        self.info = info

    async def drain(self, grace_s: float) -> None:
        """Refuse new requests, and let running requests end within `grace_s`.

        First, clients get the tokens that `min_chunk_tokens` holds back. Then gateways and drafters
        are told that the verifier stops. A gateway that has another verifier moves its sequences
        there.
        """
        engine = self._taking_requests()
        # A drain does not wait for an engine that hangs.
        with suppress(TimeoutError):
            async with asyncio.timeout(_ANSWER_S):
                await engine.call(engine.engine.stop_coalescing)
        self.report(Stage.DRAINING, "finishing what runs")
        for callers in self._caller_streams:
            callers.say_draining()
        for stream in self._streams:
            stream.say_draining("the verifier is about to stop", grace_s)
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        for callers in self._caller_streams:
            callers.end()
        for stream in self._streams:
            stream.end()

    def _taking_requests(self) -> EngineThread[ServedEngine]:
        self._ready()
        if self._serving is None:
            message = "this port is for drafters; vLLM's own server takes the requests"
            raise OutriderError(Reason.UNSUPPORTED_PARAMETER, message)
        return self._serving

    def _ready(self) -> EngineThread[DraftingEngine]:
        if self.info.stage is Stage.DRAINING:
            raise OutriderError(Reason.DRAINING, "the verifier is about to stop")
        if self._engine is None or self.info.stage is not Stage.READY:
            stage = self.info.stage.name.lower().replace("_", " ")
            message = f"the verifier is {stage}: {self.info.stage_detail}"
            raise OutriderError(Reason.NOT_READY, message)
        return self._engine

    async def GetModel(
        self, request: verifier_pb2.GetModelRequest, context: Context
    ) -> verifier_pb2.GetModelResponse:
        """Answer with the model, its stage and its drafters."""
        info = self.info
        if self._engine is not None:
            drafters, load = await self._ask(self._engine)
            info = replace(info, drafters=drafters, load=load)
        return wire_model.model_to_proto(info)

    async def _ask(self, engine: EngineThread[DraftingEngine]) -> _Answer:
        """Return the engine's drafters and load; during a long step, the engine's last report.

        Raises OutriderError(NOT_READY) if the step takes more than `_MAX_STEP_S`: the engine hangs.
        """
        if self._query is None:
            roster = engine.engine.drafting.roster
            load = engine.engine.load

            def answer() -> _Answer:
                return roster.infos(), load()

            what = "asking the engine for its drafters and its load"
            self._query = watch(engine.call(answer), what)
            self._query.add_done_callback(self._answered)
            self._query_began = self._clock()
        await asyncio.wait({self._query}, timeout=_ANSWER_S)
        step_s = self._clock() - self._query_began
        if self._query is not None and step_s > _MAX_STEP_S:
            raise OutriderError(Reason.NOT_READY, f"the verifier's step has taken {step_s:.0f} s")
        return self._answer

    def _answered(self, query: asyncio.Future[_Answer]) -> None:
        """Keep an answer for the next GetModel, even if the answer is late."""
        self._query = None
        if not query.cancelled() and query.exception() is None:
            self._answer = query.result()

    async def GenerateTokens(
        self, request: verifier_pb2.GenerateTokensRequest, context: Context
    ) -> AsyncIterator[verifier_pb2.GenerateTokensResponse]:
        """Stream the tokens that each step commits; a cancelled call frees its sequence.

        While the caller does not read, the sequence has no steps; after MOST_UNREAD_S it ends.
        """
        metadata = {str(key): str(value) for key, value in context.invocation_metadata() or ()}
        # An id in the message takes precedence over an id in the metadata.
        own = {HEADER: request.request_id or metadata.get(HEADER, "")}
        found = request_id(own, "tokens")
        request.request_id = request.request_id or found
        await context.send_initial_metadata(((HEADER, found),))
        answer = self._generate(request, metadata.get("traceparent", ""), MOST_UNREAD_S)
        async with aclosing(answer) as responses:
            async for response in responses:
                yield response

    async def AgreeVersion(
        self, request: token_streams_pb2.AgreeVersionRequest, context: Context
    ) -> token_streams_pb2.AgreeVersionResponse:
        """Choose the version of outrider.internal.v1, or refuse the gateway and log why."""
        gateway = link_versions.from_wire(request.oldest_version, request.newest_version)
        version = agreed_version(gateway, self.versions, context)
        return token_streams_pb2.AgreeVersionResponse(version=version)

    async def StreamTokens(  # type: ignore[override]  # the stubs lack writes through the context
        self,
        request_iterator: AsyncIterator[token_streams_pb2.StreamTokensRequest],
        context: Context,
    ) -> None:
        """Stream the tokens of all sequences of one caller."""
        self._ready()
        stream = GatewayStream(self._generate, aiter(request_iterator), context, self.versions)
        self._caller_streams.add(stream)
        try:
            await stream.run()
        finally:
            self._caller_streams.discard(stream)

    async def _generate(
        self,
        request: verifier_pb2.GenerateTokensRequest,
        traceparent: str,
        most_unread_s: float = _NEVER_S,
    ) -> AsyncGenerator[verifier_pb2.GenerateTokensResponse, None]:
        """Yield the tokens that each step commits; closing the generator frees the sequence.

        Raises OutriderError if the request is refused, its sequence fails, or nothing is read for
        `most_unread_s`.
        """
        with ServedSequence(request, traceparent, self._clock) as served:
            async with aclosing(self._chunks(request, served, most_unread_s)) as chunks:
                async for chunk in chunks:
                    served.add(chunk)
                    if chunk.finish_reason is not None:
                        break
                    yield wire_requests.chunk_to_proto(chunk)
        # Readers close the generator at the last chunk. So the span has to end before this chunk is
        # sent.
        yield wire_requests.chunk_to_proto(chunk)

    async def _chunks(
        self,
        request: verifier_pb2.GenerateTokensRequest,
        served: ServedSequence,
        most_unread_s: float,
    ) -> AsyncGenerator[TokenChunk, None]:
        """Yield a sequence's chunks; closing the generator frees it. Raises as `_generate` does."""
        engine = self._taking_requests()
        parsed = wire_requests.request_from_proto(
            request, vocab_size=self.info.vocab_size, context_length=self.info.context_length
        )
        served.describe(parsed)
        if parsed.model_fingerprint not in ("", self.info.model_fingerprint):
            message = "weights, dtype, settings or version differ from those that began the answer"
            raise OutriderError(Reason.MODEL_CHANGED, message)
        submitted: list[Sequence] = []

        def cancel() -> None:
            for sequence in submitted:
                engine.engine.cancel(sequence)

        def set_reading(reads: bool) -> None:
            told = engine.engine.resume if reads else engine.engine.pause
            engine.post(lambda: [told(sequence) for sequence in submitted])

        def give_up() -> None:
            engine.post(cancel)
            chunks.put(unread_error(most_unread_s))

        def submit() -> None:
            sequence = engine.engine.submit(parsed, chunks.put, served.span, matcher)
            submitted.append(sequence)

        chunks = _Chunks(set_reading, give_up, most_unread_s)
        matcher = await self._matcher(parsed)
        self._enter()
        try:
            await self._submitted(engine, submit)
            while True:
                yield await _next(chunks)
        finally:
            chunks.close()
            # The engine runs `cancel` after every `submit` posted before, so a sequence is freed
            # even if its submission is still waiting.
            engine.post(cancel)
            self._leave()

    async def _submitted(
        self, engine: EngineThread[ServedEngine], submit: Callable[[], None]
    ) -> None:
        """Submit a request.

        For JOIN_S after the verifier became ready, wait for the drafter that the request names.
        """
        while True:
            try:
                return await engine.call(submit)
            except OutriderError as error:
                if error.reason is not Reason.DRAFTER_NOT_FOUND or self._clock() > self._join_until:
                    raise
            await asyncio.sleep(_JOIN_POLL_S)

    async def _matcher(self, request: TokenRequest) -> TextMatcher | None:
        """Return a matcher that stands after the request's committed tokens.

        Return None if the request has no grammar.
        """
        grammar = request.grammar
        if grammar is None:
            return None
        if self._grammars is None:
            raise OutriderError(
                Reason.UNSUPPORTED_PARAMETER,
                "this verifier compiles no grammars",
                f"grammar.{grammar.kind.value}",
            )
        return await self._grammars.matcher_async(grammar, request.committed, request.tenant)

    def _enter(self) -> None:
        self._active += 1
        self._idle.clear()

    def _leave(self) -> None:
        self._active -= 1
        if self._active == 0:
            self._idle.set()

    async def StreamDrafts(  # type: ignore[override]  # as above
        self, request_iterator: AsyncIterator[verifier_pb2.StreamDraftsRequest], context: Context
    ) -> None:
        """Serve one drafter's stream until it leaves."""
        model = wire_model.model_to_proto(self.info)
        stream = DrafterStream(
            self._ready(), aiter(request_iterator), context, model, peer_of(context)
        )
        self._streams.add(stream)
        try:
            await stream.run()
        finally:
            self._streams.discard(stream)


async def report_health(engine: EngineThread[DraftingEngine], server: Server) -> None:
    """Keep reporting SERVING, or NOT_SERVING while the engine hangs."""
    while True:
        await server.set_serving(True)
        answered = asyncio.create_task(engine.call(lambda: None))
        try:
            await asyncio.wait({answered}, timeout=_MAX_STEP_S)
            if not answered.done():
                log.error("the engine hangs: its step takes more than %.0f s", _MAX_STEP_S)
                await server.set_serving(False)
                await answered
                log.info("the engine's step has ended")
        finally:
            answered.cancel()
        await asyncio.sleep(_HEALTH_POLL_S)


async def _next(chunks: _Chunks) -> TokenChunk:
    """Take a sequence's next chunk; raise the OutriderError that ends the sequence."""
    chunk = await chunks.get()
    if isinstance(chunk, OutriderError):
        raise chunk
    return chunk
