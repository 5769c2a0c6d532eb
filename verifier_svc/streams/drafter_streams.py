"""The draft streams on the event loop: hello and welcome, then two tasks that read and write.

This module parses and bounds messages and posts them to the engine's thread. `DraftExchange`
interprets them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from outrider.errors import OutriderError, Reason
from outrider.process.security.roles import Peer, Role
from outrider.process.tasks import until_first_end
from outrider.protocol.draft_messages import DraftBatch, Hello, StepBatch, Welcome
from outrider.protocol.wire import drafts as wire_drafts
from outrider.v1 import drafts_pb2, verifier_pb2
from verifier_svc.engine.engine_thread import EngineThread
from verifier_svc.engine.served import DraftingEngine
from verifier_svc.state.drafter import Drafter, held_bytes
from verifier_svc.streams.unread_steps import UnreadSteps

_HELLO_S = 10.0
# The maximum size of a message with several prompts or several sequences' features: half of gRPC
# clients' default limit of 4 MiB.
_MAX_MESSAGE_BYTES = 2 * 2**20
# The maximum total size of received messages that the engine has not taken yet. As Python objects,
# the messages need many times their bytes on the wire. So the stream stops reading at this size,
# and further messages wait at the drafter.
_MAX_UNTAKEN_BYTES = 2**20
_POLL_S = 0.005
# A thread checks a message that is larger than this: on the event loop, checking its distributions
# would hold up the other streams for too long.
_QUICK_BYTES = 8192
_CHECKS = ThreadPoolExecutor(1, "draft checks")

_Entry = TypeVar("_Entry", bound=Message)
Requests = AsyncIterator[verifier_pb2.StreamDraftsRequest]
Context = grpc.aio.ServicerContext[Any, Any]


class DrafterStream:
    """One drafter's stream. The engine's messages may arrive at any time after `run` began."""

    def __init__(
        self,
        engine: EngineThread[DraftingEngine],
        requests: Requests,
        context: Context,
        model: verifier_pb2.GetModelResponse,
        peer: Peer | None = None,
    ) -> None:
        """`peer` is the drafter's identity from its certificate; None without TLS."""
        self._engine = engine
        self._requests = requests
        self._context = context
        self._model = model
        self._peer = peer
        self._unread = UnreadSteps()
        self._failure = self._unread.failure
        self._draining: drafts_pb2.Draining | None = None

    async def run(self) -> None:
        """Serve until the drafter leaves.

        Raises OutriderError if the Hello or a later message is refused, if the drafter reads too
        slowly, or if the verifier stops.
        """
        hello = await self._receive_hello()
        trusted = self._peer is None or self._peer.role is Role.TRUSTED_DRAFTER
        holder = "" if self._peer is None else self._peer.name
        source = holder or _address(self._context.peer())
        joined: list[Drafter] = []
        drafting = self._engine.engine.drafting

        def join() -> None:
            """Register the drafter, on the engine's thread; raise OutriderError if refused."""
            drafter = drafting.join(
                hello, self._unread.put, trusted=trusted, holder=holder, source=source
            )
            joined.append(drafter)

        def leave() -> None:
            """Remove the drafter, on the engine's thread, if it was registered."""
            for drafter in joined:
                drafting.leave(drafter)

        try:
            await self._engine.call(join)
            model = self._model
            welcome = Welcome(
                model.model_id,
                model.vocab_size,
                model.context_length,
                joined[0].feature_width,
                joined[0].projects_features,
            )
            proto = wire_drafts.welcome_to_proto(welcome)
            await self._context.write(verifier_pb2.StreamDraftsResponse(welcome=proto))
            await until_first_end(self._failure, self._read(joined[0]), self._write())
        finally:
            self._failure.cancel()
            # The engine's thread runs `leave` after `join`, even if this call was cancelled while
            # it waited for `join`.
            self._engine.post(leave)

    def say_draining(self, reason: str, grace_s: float) -> None:
        """Tell the drafter that the verifier stops, and that sequences may run for `grace_s`."""
        draining = drafts_pb2.Draining(reason=reason)
        draining.grace_duration.FromNanoseconds(int(grace_s * 1e9))
        self._draining = draining
        self._unread.put(StepBatch())

    def end(self) -> None:
        """End the stream, because the verifier stops."""
        self._unread.put(OutriderError(Reason.DRAINING, "the verifier is about to stop"))

    async def _receive_hello(self) -> Hello:
        try:
            async with asyncio.timeout(_HELLO_S):
                first = await anext(self._requests)
        except (TimeoutError, StopAsyncIteration) as cause:
            message = f"the first message must be a Hello, within {_HELLO_S:.0f} s"
            raise _violation(message) from cause
        if first.WhichOneof("message") != "hello":
            raise _violation("the first message must be a Hello")
        hello = wire_drafts.hello_from_proto(first.hello)
        if self._peer is not None:
            self._peer.check_id("hello.drafter_id", hello.drafter_id)
        check_tokenizer(hello, self._model.tokenizer_fingerprint)
        return hello

    async def _read(self, drafter: Drafter) -> None:
        """Take messages until the drafter half-closes.

        A refused message is counted against the drafter and ends its stream.
        """
        try:
            await self._take_messages(drafter)
        except OutriderError as error:
            self._engine.post(partial(self._engine.engine.drafting.reject, drafter, error))
            await self._failure

    async def _take_messages(self, drafter: Drafter) -> None:
        engine = self._engine
        drafting = engine.engine.drafting
        read_bytes = 0
        async for request in self._requests:
            arrived_at = engine.engine.clock()
            # An event for each taken message would keep the loop busy, so this polls.
            while read_bytes - drafter.taken_bytes > _MAX_UNTAKEN_BYTES:  # noqa: ASYNC110
                await asyncio.sleep(_POLL_S)
            kind = request.WhichOneof("message")
            size = request.ByteSize()
            batch = await self._checked(request.drafts, size) if kind == "drafts" else None
            read_bytes += held_bytes(size, batch)
            if batch is not None:
                engine.post(partial(drafting.on_drafts, drafter, batch, size, arrived_at))
            elif kind is None:
                # A drafter of a later version has sent a kind of message that is unknown here.
                engine.post(partial(drafting.ignore, drafter, size))
            elif kind == "draining":
                engine.post(partial(drafting.drain, drafter, size))
            else:
                raise _violation("Hello comes first and only once")

    async def _checked(self, proto: drafts_pb2.DraftBatch, size: int) -> DraftBatch:
        """Return the drafts of a message of `size` bytes; a thread converts a large message.

        Raises OutriderError(PROTOCOL_VIOLATION).
        """
        convert = partial(wire_drafts.drafts_from_proto, proto, self._model.vocab_size)
        if size <= _QUICK_BYTES:
            return convert()
        return await asyncio.get_running_loop().run_in_executor(_CHECKS, convert)

    async def _write(self) -> None:
        while (step := await self._unread.get()) is not None:
            if self._draining is not None:
                draining, self._draining = self._draining, None
                await self._context.write(verifier_pb2.StreamDraftsResponse(draining=draining))
            if step:
                for part in _messages(wire_drafts.step_to_proto(step)):
                    await self._context.write(verifier_pb2.StreamDraftsResponse(step=part))


def check_tokenizer(hello: Hello, expected: str) -> None:
    """Raise OutriderError(TOKENIZER_MISMATCH) if the drafter has another tokenizer."""
    given = hello.tokenizer_fingerprint
    if given != expected:
        field = "hello.tokenizer_fingerprint"
        raise OutriderError(
            Reason.TOKENIZER_MISMATCH,
            f"{field} is {given}, but the target's tokenizer is {expected}; a drafter of the"
            " family model drafts for another tokenizer if its setting target names the target",
            field,
            metadata={"drafter": given, "target": expected},
        )


def _address(peer: str) -> str:
    """Return gRPC's name of a peer, such as ipv4:10.0.0.1:5000, without its port, if any."""
    return peer.rpartition(":")[0] if peer.startswith("ip") else peer


def _messages(step: drafts_pb2.StepBatch) -> Iterator[drafts_pb2.StepBatch]:
    """Split a step whose prompts or features are too long for one message.

    The first parts open sequences, the next parts have features, and the last part has the verdicts
    and the closed sequences.
    """
    if step.ByteSize() <= _MAX_MESSAGE_BYTES:
        yield step
        return
    for opened in _parts(step.opened):
        yield drafts_pb2.StepBatch(opened=opened)
    for features in _parts(step.features):
        yield drafts_pb2.StepBatch(features=features)
    yield drafts_pb2.StepBatch(verdicts=step.verdicts, closed=step.closed)


def _parts(entries: Iterable[_Entry]) -> Iterator[list[_Entry]]:
    """Divide entries into lists that each fit a message, or hold a single entry."""
    part: list[_Entry] = []
    byte_count = 0
    for entry in entries:
        size = entry.ByteSize()
        if part and byte_count + size > _MAX_MESSAGE_BYTES:
            yield part
            part = []
            byte_count = 0
        part.append(entry)
        byte_count += size
    if part:
        yield part


def _violation(message: str) -> OutriderError:
    return OutriderError(Reason.PROTOCOL_VIOLATION, message)
