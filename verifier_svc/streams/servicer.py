"""VerifierService: parses requests, hands them to the engine, streams what comes back. Owns the stage, not the model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any

import grpc

from outrider.clock import Clock, monotonic
from outrider.errors import OutriderError, Reason
from outrider.grammar.backends import Compiled
from outrider.grammar.compiler import GrammarCompiler
from outrider.internal.v1 import token_streams_pb2, token_streams_pb2_grpc
from outrider.messages import Grammar, TokenChunk
from outrider.model_info import DrafterInfo, ModelInfo, Stage
from outrider.process import telemetry
from outrider.process.rpc import reports_errors
from outrider.process.tasks import watch
from outrider.v1 import verifier_pb2, verifier_pb2_grpc
from outrider.wire import model as wire_model
from outrider.wire import requests as wire_requests
from verifier_svc.engine.engine_thread import EngineThread
from verifier_svc.state.sequence import Sequence
from verifier_svc.streams.draft_streams import DraftStream
from verifier_svc.streams.token_streams import TokenStream

Context = grpc.aio.ServicerContext[Any, Any]
# How long who asks for the model waits for a step to end, and after which time an engine hangs.
_STEP_S, _LONGEST_STEP_S = 0.25, 60.0


class VerifierServicer(
    verifier_pb2_grpc.VerifierServiceServicer, token_streams_pb2_grpc.TokenStreamServiceServicer
):
    """Answers GetModel from the start, and the rest once `serve` has been called."""

    def __init__(self, model_id: str, clock: Clock = monotonic) -> None:
        self._clock = clock
        self.info = ModelInfo(model_id, Stage.LOADING, "starting")
        self._engine: EngineThread | None = None
        self._grammars: GrammarCompiler | None = None
        self._streams: set[DraftStream] = set()
        self._token_streams: set[TokenStream] = set()
        # A question about drafters that the engine has not answered yet, and what was answered last.
        self._asked: asyncio.Future[tuple[DrafterInfo, ...]] | None = None
        self._asked_at = 0.0
        self._drafter_infos: tuple[DrafterInfo, ...] = ()
        self._idle = asyncio.Event()
        self._idle.set()
        self._active = 0

    def report(self, stage: Stage, detail: str) -> None:
        """Say how far loading is."""
        self.info = replace(self.info, stage=stage, stage_detail=detail)

    def serve(
        self, engine: EngineThread, info: ModelInfo, grammars: GrammarCompiler | None = None
    ) -> None:
        """Begin to take requests and drafters; requests with a grammar only where they can be compiled."""
        self._engine, self.info, self._grammars = engine, info, grammars

    async def drain(self, grace_s: float) -> None:
        """Take nothing new, tell the drafters, and wait for running requests for at most `grace_s`."""
        self.report(Stage.DRAINING, "finishing what runs")
        for stream in self._streams:
            stream.say_draining("the verifier is about to stop", grace_s)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), grace_s)
        for callers in self._token_streams:
            callers.end()
        for stream in self._streams:
            stream.end()

    def _ready(self) -> EngineThread:
        if self.info.stage is Stage.DRAINING:
            raise OutriderError(Reason.DRAINING, "the verifier is about to stop")
        if self._engine is None or self.info.stage is not Stage.READY:
            stage = self.info.stage.name.lower().replace("_", " ")
            raise OutriderError(
                Reason.NOT_READY, f"the verifier is {stage}: {self.info.stage_detail}"
            )
        return self._engine

    @reports_errors
    async def GetModel(
        self, request: verifier_pb2.GetModelRequest, context: Context
    ) -> verifier_pb2.GetModelResponse:
        """The model, its stage and its drafters."""
        info = self.info
        if self._engine is not None:
            info = replace(info, drafters=await self._drafters(self._engine))
        return wire_model.model_to_proto(info)

    async def _drafters(self, engine: EngineThread) -> tuple[DrafterInfo, ...]:
        """As the engine knows them, or last knew them if its step takes long, which is no reason to seem gone.

        Raises OutriderError(NOT_READY) for an engine that ends no step any more.
        """
        if self._asked is None:
            self._asked = watch(
                engine.call(engine.engine.drafting.roster.infos),
                "asking the engine for its drafters",
            )
            self._asked.add_done_callback(self._answered)
            self._asked_at = self._clock()
        await asyncio.wait({self._asked}, timeout=_STEP_S)
        if (
            self._asked is not None
            and (seconds := self._clock() - self._asked_at) > _LONGEST_STEP_S
        ):
            raise OutriderError(Reason.NOT_READY, f"the verifier's step has taken {seconds:.0f} s")
        return self._drafter_infos

    def _answered(self, asked: asyncio.Future[tuple[DrafterInfo, ...]]) -> None:
        """However late, for whoever asks next."""
        self._asked = None
        if not asked.cancelled() and asked.exception() is None:
            self._drafter_infos = asked.result()

    @reports_errors
    async def GenerateTokens(
        self, request: verifier_pb2.GenerateTokensRequest, context: Context
    ) -> AsyncIterator[verifier_pb2.GenerateTokensResponse]:
        """Stream what each step commits; a call that is cancelled frees its sequence."""
        metadata = {str(key): str(value) for key, value in context.invocation_metadata() or ()}
        async with aclosing(self._generate(request, metadata.get("traceparent", ""))) as responses:
            async for response in responses:
                yield response

    @reports_errors
    async def StreamTokens(  # type: ignore[override]  # writes through the context, which the stubs do not know of
        self,
        request_iterator: AsyncIterator[token_streams_pb2.StreamTokensRequest],
        context: Context,
    ) -> None:
        """The same for all sequences of one caller."""
        self._ready()
        stream = TokenStream(self._generate, aiter(request_iterator), context)
        self._token_streams.add(stream)
        try:
            await stream.run()
        finally:
            self._token_streams.discard(stream)

    async def _generate(
        self, request: verifier_pb2.GenerateTokensRequest, traceparent: str
    ) -> AsyncGenerator[verifier_pb2.GenerateTokensResponse, None]:
        """What each step commits for one sequence, which is freed when this is closed; raises OutriderError."""
        engine = self._ready()
        parsed = wire_requests.request_from_proto(
            request, vocab_size=self.info.vocab_size, context_length=self.info.context_length
        )
        chunks: asyncio.Queue[TokenChunk | OutriderError] = asyncio.Queue()
        submitted: list[Sequence] = []

        def cancel() -> None:
            for sequence in submitted:
                engine.engine.cancel(sequence)

        grammar = await self._compiled(parsed.grammar)
        self._enter()
        with telemetry.start("generate_tokens", traceparent) as span:
            span.set(
                outrider__request_id=parsed.request_id,
                gen_ai__usage__input_tokens=len(parsed.prompt),
            )
            try:
                await engine.call(
                    lambda: submitted.append(
                        engine.engine.submit(parsed, chunks.put_nowait, span, grammar)
                    )
                )
                while (chunk := await _next(chunks)).finish_reason is None:
                    yield wire_requests.chunk_to_proto(chunk)
            finally:
                # Posted behind `submit`, so that a call cancelled before it ran is cancelled after it.
                engine.post(cancel)
                self._leave()
        # After the span has ended, since readers close the generator here, and do not ask for what comes after the last chunk.
        yield wire_requests.chunk_to_proto(chunk)

    async def _compiled(self, grammar: Grammar | None) -> Compiled | None:
        if grammar is None:
            return None
        if self._grammars is None:
            raise OutriderError(
                Reason.UNSUPPORTED_PARAMETER,
                "this verifier compiles no grammars",
                f"grammar.{grammar.kind.value}",
            )
        return await self._grammars.compile_async(grammar)

    def _enter(self) -> None:
        self._active += 1
        self._idle.clear()

    def _leave(self) -> None:
        self._active -= 1
        if self._active == 0:
            self._idle.set()

    @reports_errors
    async def StreamDrafts(  # type: ignore[override]  # writes through the context, which the stubs do not know of
        self, request_iterator: AsyncIterator[verifier_pb2.StreamDraftsRequest], context: Context
    ) -> None:
        """One drafter's stream, until it leaves."""
        stream = DraftStream(
            self._ready(), aiter(request_iterator), context, wire_model.model_to_proto(self.info)
        )
        self._streams.add(stream)
        try:
            await stream.run()
        finally:
            self._streams.discard(stream)


async def _next(chunks: asyncio.Queue[TokenChunk | OutriderError]) -> TokenChunk:
    """What the engine says next of a sequence; raises the OutriderError that it ends with."""
    chunk = await chunks.get()
    if isinstance(chunk, OutriderError):
        raise chunk
    return chunk
