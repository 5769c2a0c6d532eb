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
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from outrider.conformance.ledger import Complain, Ledger
from outrider.errors import DOMAIN, OutriderError, Reason, Retry
from outrider.process import rpc
from outrider.process.credentials import peer_of
from outrider.process.roles import Peer
from outrider.protocol.limits import MAX_DRAFT_TOKENS, MAX_FAMILY_LENGTH, MAX_NAME_LENGTH
from outrider.v1 import drafts_pb2, verifier_pb2, verifier_pb2_grpc

Note = Callable[[str, dict[str, Any]], None]
"""Takes the sender's name and its message, for the transcript."""


class Broken(Exception):
    """A scene found a broken rule. `ended` tells that it did because the stream had ended."""

    def __init__(self, rule: str, reason: str, ended: bool = False) -> None:
        super().__init__(f"{rule}: {reason}")
        self.rule = rule
        self.reason = reason
        self.ended = ended


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
        self._outbox: asyncio.Queue[Message | None] = asyncio.Queue()
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

    def end(self, status: status_pb2.Status | None) -> None:
        """End the stream with this status; with None, as if the process had died."""
        self._note("verifier", {"ends": reason_in(status) if status else "without a status"})
        self._outbox.put_nowait(status)
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
        """Send queued messages until `end`, and end the call with the status that it was given."""
        while (message := await self._outbox.get()) is not None:
            if isinstance(message, status_pb2.Status):
                await context.abort_with_status(rpc_status.to_status(message))
            await context.write(message)
        await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    def close(self) -> None:
        """Mark the stream as ended and wake `until`."""
        self.ended = True
        self._changed.set()


class ScriptedVerifier(verifier_pb2_grpc.VerifierServiceServicer):
    """GetModel returns `model`. While `refusal` is set, each new stream ends with it."""

    def __init__(
        self,
        model: verifier_pb2.GetModelResponse,
        complain: Complain,
        remark: Complain,
        note: Note,
    ) -> None:
        self.model = model
        self.refusal: status_pb2.Status | None = None
        self.refuses_every_call = False
        """Whether GetModel ends with the refusal too, as it does for a wrong certificate."""
        self.attempts: list[float] = []
        """Times at which streams were opened, and of calls that were refused."""
        self.links: asyncio.Queue[Link] = asyncio.Queue()
        self._complain = complain
        self._remark = remark
        self._note = note

    @rpc.reports_errors
    async def GetModel(
        self, request: verifier_pb2.GetModelRequest, context: Any
    ) -> verifier_pb2.GetModelResponse:
        """The model that the kit pretends to serve; refused if the refusal covers every call."""
        if self.refuses_every_call:
            self.attempts.append(time.monotonic())
            await self._refuse(context)
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
        """Welcome a drafter and queue its Link; end with `refusal` instead while it is set."""
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
        await self._refuse(context)
        ledger = Ledger(self.model.vocab_size, self._complain, self._remark)
        link = Link(first.hello, ledger, self._note)
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

    async def _refuse(self, context: Any) -> None:
        """End the call with the refusal, if one is set."""
        if self.refusal is not None:
            self._note("verifier", {"ends": reason_in(self.refusal)})
            await context.abort_with_status(rpc_status.to_status(self.refusal))

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


def refused(reason: Reason, retry_after_s: float | None = None) -> status_pb2.Status:
    """A status with which the scripted verifier refuses a drafter."""
    message = "the conformance kit refuses"
    return rpc.status_of(OutriderError(reason, message, retry_after_s=retry_after_s))


def refused_for_a_later_reason(retry: Retry) -> status_pb2.Status:
    """A refusal for a reason that only a later version knows, with this retry rule."""
    message = f"the conformance kit refuses for a later version's reason; retry: {retry.value}"
    reason = "REASON_OF_A_LATER_VERSION"
    info = error_details_pb2.ErrorInfo(
        reason=reason, domain=DOMAIN, metadata={"retry": retry.name.lower()}
    )
    status = status_pb2.Status(code=code_pb2.FAILED_PRECONDITION, message=message)
    status.details.add().Pack(info)
    return status


def reason_in(status: status_pb2.Status) -> str:
    """The reason in a status' ErrorInfo; empty if it has none."""
    info = error_details_pb2.ErrorInfo()
    for packed in status.details:
        packed.Unpack(info)
    reason: str = info.reason
    return reason
