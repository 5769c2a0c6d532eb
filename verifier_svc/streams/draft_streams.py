"""The draft streams as the event loop sees them: hello and welcome, then reading and writing as separate tasks.

What a message means is for `drafting`; here it is parsed, bounded and handed to the engine's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

import grpc

from outrider.errors import OutriderError, Reason
from outrider.messages import Hello, StepBatch
from outrider.v1 import drafts_pb2, verifier_pb2
from outrider.wire import drafts as wire_drafts
from verifier_svc.engine.engine_thread import EngineThread
from verifier_svc.state.drafter import MESSAGE_BYTES, Drafter

# A drafter that does not read for this many engine steps is cut off before memory grows.
MAX_UNSENT = 1024
_HELLO_S = 10.0
# Of a message that opens several sequences: half of the 4 MiB that gRPC's clients take unless told otherwise.
_MOST_BYTES = 2 * 2**20
# What a drafter says during a step waits in memory, as objects many times that large; the rest waits with the drafter.
_MOST_UNTAKEN, _LOOK_AGAIN_S = 2**20, 0.005

Requests = AsyncIterator[verifier_pb2.StreamDraftsRequest]
Context = grpc.aio.ServicerContext[Any, Any]


class DraftStream:
    """One drafter's stream. `sink` may be called on the event loop at any time after `run` began."""

    def __init__(
        self,
        engine: EngineThread,
        requests: Requests,
        context: Context,
        model: verifier_pb2.GetModelResponse,
    ) -> None:
        self._engine = engine
        self._requests = requests
        self._context = context
        self._model = model
        self._unsent: asyncio.Queue[verifier_pb2.StreamDraftsResponse] = asyncio.Queue()
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Serve until the drafter leaves; raises OutriderError when it, or its Hello, is not acceptable."""
        hello = await self._receive_hello()
        joined: list[Drafter] = []

        drafting = self._engine.engine.drafting

        def join() -> None:
            joined.append(drafting.join(hello, self._sink))

        def leave() -> None:
            for drafter in joined:
                drafting.leave(drafter)

        tasks: list[asyncio.Future[None]] = [self._failure]
        try:
            await self._engine.call(join)
            welcome = drafts_pb2.Welcome(
                model_id=self._model.model_id,
                vocab_size=self._model.vocab_size,
                context_length=self._model.context_length,
            )
            await self._context.write(verifier_pb2.StreamDraftsResponse(welcome=welcome))
            tasks += [
                asyncio.create_task(self._read(joined[0])),
                asyncio.create_task(self._write()),
            ]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                await task
        finally:
            for task in tasks:
                task.cancel()
            # Posted behind `join`, so that a drafter whose call was cancelled in between leaves as well.
            self._engine.post(leave)

    def say_draining(self, reason: str, grace_s: float) -> None:
        """Tell the drafter that the verifier is about to leave, and how long open sequences may still run."""
        draining = drafts_pb2.Draining(reason=reason)
        draining.grace_time.FromNanoseconds(int(grace_s * 1e9))
        self._unsent.put_nowait(verifier_pb2.StreamDraftsResponse(draining=draining))

    def end(self) -> None:
        """End the stream, as the verifier leaves."""
        if not self._failure.done():
            self._failure.set_exception(
                OutriderError(Reason.DRAINING, "the verifier is about to stop")
            )

    async def _receive_hello(self) -> Hello:
        try:
            first = await asyncio.wait_for(anext(self._requests), _HELLO_S)
        except (TimeoutError, StopAsyncIteration) as cause:
            raise _violation(
                f"the first message must be a Hello, within {_HELLO_S:.0f} s"
            ) from cause
        if first.WhichOneof("message") != "hello":
            raise _violation("the first message must be a Hello")
        hello = wire_drafts.hello_from_proto(first.hello)
        expected = self._model.tokenizer_fingerprint
        if hello.tokenizer_fingerprint != expected:
            raise OutriderError(
                Reason.TOKENIZER_MISMATCH,
                f"hello.tokenizer_fingerprint is {hello.tokenizer_fingerprint}, but the target's tokenizer is {expected}",
                "hello.tokenizer_fingerprint",
                metadata={"drafter": hello.tokenizer_fingerprint, "target": expected},
            )
        return hello

    async def _read(self, drafter: Drafter) -> None:
        """Take messages until the drafter half-closes; what it must not say is counted against it and ends the stream."""
        try:
            await self._take_messages(drafter)
        except OutriderError as error:
            self._engine.post(partial(self._engine.engine.drafting.reject, drafter, error))
            await self._failure

    async def _take_messages(self, drafter: Drafter) -> None:
        engine, drafting, read_bytes = self._engine, self._engine.engine.drafting, 0
        async for request in self._requests:
            arrived_at = engine.engine.clock()
            while read_bytes - drafter.taken_bytes > _MOST_UNTAKEN:  # noqa: ASYNC110  # told of each message, the loop would do little else
                await asyncio.sleep(_LOOK_AGAIN_S)
            kind, size = request.WhichOneof("message"), request.ByteSize()
            if kind == "drafts":
                batch = wire_drafts.drafts_from_proto(request.drafts, self._model.vocab_size)
                read_bytes += size + MESSAGE_BYTES
                engine.post(partial(drafting.on_drafts, drafter, batch, size, arrived_at))
            elif kind is None:
                # A kind of message that only a later version knows.
                read_bytes += size + MESSAGE_BYTES
                engine.post(partial(drafting.ignore, drafter, size))
            elif kind == "draining":
                engine.post(partial(drafting.drain, drafter))
            else:
                raise _violation("Hello comes first and only once")

    async def _write(self) -> None:
        while True:
            await self._context.write(await self._unsent.get())

    def _sink(self, message: StepBatch | OutriderError) -> None:
        """Called on the event loop after an engine step."""
        if self._failure.done():
            return
        if isinstance(message, OutriderError):
            self._failure.set_exception(message)
        elif self._unsent.qsize() >= MAX_UNSENT:
            self._failure.set_exception(
                OutriderError(
                    Reason.SLOW_READER, f"{MAX_UNSENT} steps are unread; the stream is cut off"
                )
            )
        else:
            for step in _messages(wire_drafts.step_to_proto(message)):
                self._unsent.put_nowait(verifier_pb2.StreamDraftsResponse(step=step))


def _messages(step: drafts_pb2.StepBatch) -> Iterator[drafts_pb2.StepBatch]:
    """The step in several messages if its prompts are too long for one: what was opened first, then what became of it."""
    if step.ByteSize() <= _MOST_BYTES:
        yield step
        return
    part, byte_count = drafts_pb2.StepBatch(), 0
    for opened in step.opened:
        size = opened.ByteSize()
        if part.opened and byte_count + size > _MOST_BYTES:
            yield part
            part, byte_count = drafts_pb2.StepBatch(), 0
        part.opened.append(opened)
        byte_count += size
    yield part
    yield drafts_pb2.StepBatch(verdicts=step.verdicts, closed=step.closed)


def _violation(message: str) -> OutriderError:
    return OutriderError(Reason.PROTOCOL_VIOLATION, message)
