"""A verifier that a drafter dials: the draft stream over gRPC."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from outrider.drafter.transport import StreamEnded
from outrider.errors import OutriderError, Reason, Retry
from outrider.process.clock import Clock, monotonic
from outrider.process.network import rpc, rpc_errors
from outrider.process.security.tls import Tls, explain
from outrider.protocol.draft_messages import DraftBatch, Hello, StepBatch, Welcome
from outrider.protocol.limits import MAX_BATCH_TOKENS
from outrider.protocol.model_info import ModelInfo, Stage
from outrider.protocol.wire import drafts as wire_drafts
from outrider.protocol.wire import model as wire_model
from outrider.v1 import drafts_pb2, verifier_pb2, verifier_pb2_grpc

log = logging.getLogger(__name__)

_POLL_LOADING_S = 0.25
# A wait for the verifier is logged only after this time, since the verifier may still be loading.
_LOG_WAIT_AFTER_S = 30.0
# The maximum number of proposals and skips in a message. If each proposal has 8 sampled tokens with
# 32 probabilities for each token, the message takes about 1 MB of the 16 MiB that it may have.
_MAX_MESSAGE_ENTRIES = 512
_END: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # grpc-stubs lack it
# The exceptions that a read raises when its call is over.
_CALL_OVER = (grpc.aio.AioRpcError, asyncio.InvalidStateError)


async def wait_until_ready(
    channel: grpc.aio.Channel, clock: Clock = monotonic, tls: Tls | None = None
) -> ModelInfo:
    """Poll GetModel until the verifier is READY; return its model.

    `tls` has the files that the channel was made with. Never times out. Raises AioRpcError if the
    verifier refuses the call for good. Raises OutriderError if an answer is invalid, or if the
    files change, since the channel goes on using the old files.
    """
    stub = verifier_pb2_grpc.VerifierServiceStub(channel)
    logged = ""
    log_after = clock() + _LOG_WAIT_AFTER_S
    stamp = tls and tls.stamp()
    while True:
        is_refused = False
        try:
            response = await stub.GetModel(verifier_pb2.GetModelRequest(), timeout=10)
            info = wire_model.model_from_proto(rpc_errors.readable(response))
            if info.stage is Stage.READY:
                return info
            state = f"{info.stage.name.lower()}: {info.stage_detail}"
        except grpc.aio.AioRpcError as failure:
            error = rpc_errors.error_of(failure)
            if error.retry is Retry.NEVER:
                raise
            reason = explain(error.message, tls)
            is_refused = reason != error.message
            state = f"{failure.code().name}: {reason}"
        if tls is not None and tls.stamp() != stamp:
            raise OutriderError(Reason.VERIFIER_UNAVAILABLE, "the certificate's files have changed")
        # Waiting does not help if a certificate is refused, so the refusal is logged at once.
        if state != logged and (is_refused or clock() > log_after):
            log.info("waiting for the verifier (%s)", state)
            logged = state
        await asyncio.sleep(_POLL_LOADING_S)


class Dialled:
    """A verifier at an address; implements `outrider.drafter.transport.Verifier`."""

    def __init__(
        self, address: Callable[[], str], tls: Tls | None = None, clock: Clock = monotonic
    ) -> None:
        """Each connection calls `address` and reads `tls` anew.

        The verifier's socket may appear after this drafter started, so its address may change.
        """
        self.address = address
        self._tls = tls
        self._clock = clock

    async def model(self) -> ModelInfo:
        """Wait until the verifier is READY; raise StreamEnded if it refuses the call for good."""
        address = self.address()
        log.info("dialling %s", address)
        async with rpc.dial(address, self._tls) as channel:
            try:
                return await wait_until_ready(channel, self._clock, self._tls)
            except grpc.aio.AioRpcError as failure:
                raise StreamEnded(rpc_errors.error_of(failure)) from failure

    @asynccontextmanager
    async def connect(self, info: ModelInfo) -> AsyncIterator[_Call]:
        """Dial, and begin a call of StreamDrafts."""
        address = self.address()
        async with rpc.dial(address, self._tls) as channel:
            yield _Call(address, channel, info.vocab_size)


class _Call:
    """A call of StreamDrafts; implements `outrider.drafter.transport.Transport`."""

    def __init__(self, address: str, channel: grpc.aio.Channel, vocab_size: int) -> None:
        self.address = address
        stub: Any = verifier_pb2_grpc.VerifierServiceStub(channel)
        self._call: Any = stub.StreamDrafts()
        self._vocab_size = vocab_size

    async def introduce(self, hello: Hello) -> Welcome:
        """Send Hello and wait for Welcome."""
        await self._send(verifier_pb2.StreamDraftsRequest(hello=wire_drafts.hello_to_proto(hello)))
        first = await self._receive()
        if first is None or first.WhichOneof("message") != "welcome":
            message = "the verifier's first message must be a Welcome"
            raise OutriderError(Reason.PROTOCOL_VIOLATION, message)
        return wire_drafts.welcome_from_proto(first.welcome)

    async def read(self) -> StepBatch | None:
        """Wait for the next step; None at the end. Raises OutriderError for an invalid step."""
        while (response := await self._receive()) is not None:
            if response.WhichOneof("message") == "step":
                return wire_drafts.step_from_proto(response.step, self._vocab_size)
            if response.WhichOneof("message") == "draining":
                log.info("the verifier is draining: %s", response.draining.reason)
        return None

    async def write(self, batch: DraftBatch) -> None:
        """Send drafts, in as many messages as they need."""
        for part in _messages(batch):
            proto = wire_drafts.drafts_to_proto(part)
            await self._send(verifier_pb2.StreamDraftsRequest(drafts=proto))

    async def say_goodbye(self) -> None:
        """Send Draining and half-close."""
        goodbye = drafts_pb2.Draining(reason="the drafter is stopping")
        await self._send(verifier_pb2.StreamDraftsRequest(draining=goodbye))
        await self._call.done_writing()

    async def _send(self, request: verifier_pb2.StreamDraftsRequest) -> None:
        try:
            await self._call.write(request)
        except grpc.aio.AioRpcError as failure:
            raise StreamEnded(rpc_errors.error_of(failure)) from failure
        except asyncio.InvalidStateError as failure:
            # The call was over before this write.
            await self._raise_status()
            message = "the verifier ended the stream"
            raise StreamEnded(OutriderError(Reason.VERIFIER_UNAVAILABLE, message)) from failure

    async def _receive(self) -> verifier_pb2.StreamDraftsResponse | None:
        """Return the next message, or None if the call has ended with the status OK."""
        try:
            response = await self._call.read()
        except _CALL_OVER:
            response = _END
        if response is _END:
            await self._raise_status()
            return None
        message: verifier_pb2.StreamDraftsResponse = rpc_errors.readable(response)
        return message

    async def _raise_status(self) -> None:
        """Raise StreamEnded with the status of the ended call, unless the status is OK."""
        code = await self._call.code()
        if code is not grpc.StatusCode.OK:
            initial = await self._call.initial_metadata()
            trailing = await self._call.trailing_metadata()
            details = await self._call.details()
            failure = grpc.aio.AioRpcError(code, initial, trailing, details, None)
            raise StreamEnded(rpc_errors.error_of(failure)) from failure


def _messages(batch: DraftBatch) -> Iterator[DraftBatch]:
    """Split a batch into messages of at most 512 entries and MAX_BATCH_TOKENS tokens.

    A batch that fits stays whole, because the verifier divides the drafting time of a message by
    the length of the longest draft in that message.
    """
    token_count = sum([len(proposal.token_ids) for proposal in batch.proposals])
    entry_count = len(batch.proposals) + len(batch.skips)
    if entry_count <= _MAX_MESSAGE_ENTRIES and token_count <= MAX_BATCH_TOKENS:
        yield batch
        return
    part = DraftBatch()
    room = MAX_BATCH_TOKENS
    for proposal in batch.proposals:
        room -= len(proposal.token_ids)
        if room < 0 or len(part.proposals) == _MAX_MESSAGE_ENTRIES:
            yield part
            part = DraftBatch()
            room = MAX_BATCH_TOKENS - len(proposal.token_ids)
        part.proposals.append(proposal)
    if part.proposals:
        yield part
    for first in range(0, len(batch.skips), _MAX_MESSAGE_ENTRIES):
        yield DraftBatch(skips=batch.skips[first : first + _MAX_MESSAGE_ENTRIES])
