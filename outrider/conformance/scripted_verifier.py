"""A verifier without a model, over real gRPC: sends a scene's messages and records the answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from outrider.conformance.ledger import Complain, Ledger
from outrider.errors import OutriderError, Reason
from outrider.limits import MAX_DRAFT_TOKENS, MAX_FAMILY_LENGTH, MAX_NAME_LENGTH
from outrider.process import rpc
from outrider.process.credentials import peer_of
from outrider.process.roles import Peer
from outrider.v1 import drafts_pb2, verifier_pb2, verifier_pb2_grpc

Note = Callable[[str, dict[str, Any]], None]
"""Takes the sender's name and its message, for the transcript."""


class Broken(Exception):
    """A scene found a broken rule."""

    def __init__(self, rule: str, reason: str) -> None:
        super().__init__(f"{rule}: {reason}")
        self.rule = rule
        self.reason = reason


class Link:
    """One stream of the drafter, after its Hello."""

    def __init__(self, hello: drafts_pb2.Hello, ledger: Ledger, note: Note) -> None:
        self.hello = hello
        self.ledger = ledger
        self.began_at = time.monotonic()
        self.received_at = self.began_at
        self.ended = False
        self.half_closed = asyncio.Event()
        self.draining = False
        self._note = note
        self._outbox: asyncio.Queue[Message | OutriderError | None] = asyncio.Queue()
        self._changed = asyncio.Event()

    def step(self, **fields: Any) -> None:
        """Send a StepBatch with these fields."""
        batch = drafts_pb2.StepBatch(**fields)
        self.ledger.sent(batch)
        self.send(verifier_pb2.StreamDraftsResponse(step=batch))

    def send(self, message: Message) -> None:
        """Send any message and record it in the transcript."""
        self._note("verifier", MessageToDict(message, preserving_proto_field_name=True))
        self._outbox.put_nowait(message)

    def end(self, error: OutriderError | None) -> None:
        """End the stream with the error; with None, as if the process had died."""
        self._note("verifier", {"ends": error.reason.name if error else "without a status"})
        self._outbox.put_nowait(error)
        self.close()

    async def until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait for the condition; returns whether it holds. Each message triggers a check."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not condition() and not self.ended:
                    self._changed.clear()
                    await self._changed.wait()
        return condition()

    async def read(self, requests: AsyncIterator[verifier_pb2.StreamDraftsRequest]) -> None:
        """Note and check each message until the drafter half-closes."""
        async for request in requests:
            self._note("drafter", MessageToDict(request, preserving_proto_field_name=True))
            self.received_at = time.monotonic()
            if request.HasField("drafts"):
                self.ledger.received(request.drafts)
            self.draining |= request.HasField("draining")
            self._changed.set()
        self._note("drafter", {"half_closes": True})
        self.half_closed.set()

    async def write(self, context: Any) -> None:
        """Send queued messages until `end`. Raises the OutriderError that `end` was given."""
        while (message := await self._outbox.get()) is not None:
            if isinstance(message, OutriderError):
                raise message
            await context.write(message)
        await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    def close(self) -> None:
        """Mark the stream as ended and wake `until`."""
        self.ended = True
        self._changed.set()


class ScriptedVerifier(verifier_pb2_grpc.VerifierServiceServicer):
    """GetModel returns `model`. While `refusal` is set, each new stream ends with it."""

    def __init__(
        self, model: verifier_pb2.GetModelResponse, complain: Complain, note: Note
    ) -> None:
        self.model = model
        self.refusal: OutriderError | None = None
        self.attempts: list[float] = []
        """Times at which streams were opened, refused ones included."""
        self.links: asyncio.Queue[Link] = asyncio.Queue()
        self._complain = complain
        self._note = note

    @rpc.reports_errors
    async def GetModel(
        self, request: verifier_pb2.GetModelRequest, context: Any
    ) -> verifier_pb2.GetModelResponse:
        """The model that the kit pretends to serve."""
        return self.model

    @rpc.reports_errors
    async def GenerateTokens(  # type: ignore[override]  # refuses through the context
        self, request: verifier_pb2.GenerateTokensRequest, context: Any
    ) -> verifier_pb2.GenerateTokensResponse:
        """Refuse each request: raises OutriderError(UNSUPPORTED_PARAMETER)."""
        raise OutriderError(Reason.UNSUPPORTED_PARAMETER, "the conformance kit has no model")

    @rpc.reports_errors
    async def StreamDrafts(  # type: ignore[override]  # the stubs do not know writes to the context
        self, request_iterator: AsyncIterator[verifier_pb2.StreamDraftsRequest], context: Any
    ) -> None:
        """Welcome a drafter and queue its Link; raises `refusal` instead while it is set."""
        self.attempts.append(time.monotonic())
        requests = aiter(request_iterator)
        try:
            async with asyncio.timeout(10):
                first = await anext(requests)
        except (TimeoutError, StopAsyncIteration):
            self._complain("hello", "no Hello came within 10 s")
            return
        self._note("drafter", MessageToDict(first, preserving_proto_field_name=True))
        self._check_hello(first, peer_of(context))
        if self.refusal is not None:
            self._note("verifier", {"ends": self.refusal.reason.name})
            raise self.refusal
        link = Link(first.hello, Ledger(self.model.vocab_size, self._complain), self._note)
        welcome = drafts_pb2.Welcome(
            model_id=self.model.model_id,
            vocab_size=self.model.vocab_size,
            context_length=self.model.context_length,
        )
        link.send(verifier_pb2.StreamDraftsResponse(welcome=welcome))
        tasks = [asyncio.create_task(link.read(requests)), asyncio.create_task(link.write(context))]
        self.links.put_nowait(link)
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                await task
        finally:
            for task in tasks:
                task.cancel()
            link.close()

    def _check_hello(self, first: verifier_pb2.StreamDraftsRequest, peer: Peer | None) -> None:
        hello = first.hello
        if peer is not None:
            try:
                peer.check_id("drafter_id", hello.drafter_id)
            except OutriderError as error:
                self._complain("hello", error.message)
        if first.WhichOneof("message") != "hello":
            self._complain("hello", "the first message is no Hello")
        if hello.tokenizer_fingerprint != self.model.tokenizer_fingerprint:
            self._complain("hello", f"tokenizer_fingerprint is {hello.tokenizer_fingerprint!r}")
        has_valid_id = 1 <= len(hello.drafter_id) <= MAX_NAME_LENGTH
        if not (has_valid_id and 1 <= len(hello.family) <= MAX_FAMILY_LENGTH):
            lengths = f"1 to {MAX_NAME_LENGTH} characters, family 1 to {MAX_FAMILY_LENGTH}"
            self._complain("hello", f"drafter_id must have {lengths}")
        if not 1 <= hello.max_draft_tokens <= MAX_DRAFT_TOKENS:
            self._complain("hello", f"max_draft_tokens is {hello.max_draft_tokens}")


def refused(reason: Reason, retry_after_s: float | None = None) -> OutriderError:
    """An error with which the scripted verifier refuses a drafter."""
    return OutriderError(reason, "the conformance kit refuses", retry_after_s=retry_after_s)
