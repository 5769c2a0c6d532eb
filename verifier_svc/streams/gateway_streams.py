"""All sequences of one caller on one stream; a step's tokens leave in as few messages as possible.

Each message costs the event loops at both ends about a hundred microseconds, many times the cost of
its content. If verifier and gateway share the target's cores, the forward loses that time. This
module works without an engine: a call is any generator of responses.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from functools import partial
from typing import Any

import grpc

from outrider.errors import OutriderError, Reason
from outrider.internal.v1 import token_streams_pb2
from outrider.process.network import rpc_errors
from outrider.protocol import link_versions
from outrider.protocol.link_versions import Versions
from outrider.protocol.wire.batches import take_batch
from outrider.v1 import verifier_pb2

log = logging.getLogger(__name__)

# A caller that leaves more than this many bytes unread loses its stream, so that it cannot fill the
# verifier's memory. The parts of one step are far smaller.
MOST_UNSENT_BYTES = 64 * 2**20

Requests = AsyncIterator[token_streams_pb2.StreamTokensRequest]
Context = grpc.aio.ServicerContext[Any, Any]
Generate = Callable[
    [verifier_pb2.GenerateTokensRequest, str],
    AsyncGenerator[verifier_pb2.GenerateTokensResponse, None],
]
"""Answers one request, given its traceparent; raises OutriderError."""


class GatewayStream:
    """One caller's stream: it runs the caller's calls and batches their responses."""

    def __init__(
        self,
        generate: Generate,
        requests: Requests,
        context: Context,
        versions: Versions,
    ) -> None:
        """`versions` are the versions of outrider.internal.v1 that this verifier speaks."""
        self._generate = generate
        self._versions = versions
        self._requests = requests
        self._context = context
        self._calls: dict[int, asyncio.Task[None]] = {}
        # Maps the number of a paused call to the event that is set when the call continues.
        self._paused: dict[int, asyncio.Event] = {}
        self._unsent: list[token_streams_pb2.TokensPart] = []
        self._unsent_bytes = 0
        self._has_unsent = asyncio.Event()
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._over = False
        self._draining = False

    async def run(self) -> None:
        """Serve until the caller ends the stream or `end` is called.

        Raises OutriderError: NOT_READY if the caller's version is not one of this verifier's,
        PROTOCOL_VIOLATION for an invalid message, SLOW_READER if the caller leaves
        MOST_UNSENT_BYTES unread.
        """
        # The metadata go out at once. If not, gRPC would send them with the first message or with a
        # status, and gRPC refuses a status while it writes a message with metadata.
        await self._context.send_initial_metadata(())
        reading = asyncio.create_task(self._read())
        writing = asyncio.create_task(self._write())
        try:
            await asyncio.wait({reading, writing, self._ended}, return_when=asyncio.FIRST_COMPLETED)
            for ended in (reading, self._ended):
                if ended.done():
                    ended.result()
            await _cancel(*self._calls.values())
            self._over = True
            self._has_unsent.set()
            await writing
        finally:
            await _cancel(reading, writing, *self._calls.values())

    def say_draining(self) -> None:
        """Tell the caller that the verifier is about to stop."""
        self._draining = True
        self._has_unsent.set()

    def end(self) -> None:
        """Cancel the running calls, send their last parts and end the stream."""
        if not self._ended.done():
            self._ended.set_result(None)

    async def _read(self) -> None:
        """Start, pause and cancel calls; after the last message, wait for the running calls."""
        is_first = True
        async for message in self._requests:
            if is_first:
                is_first = False
                said = link_versions.from_wire(message.version, message.version)
                agreed_version(said, self._versions, self._context)
            for request in message.requests:
                self._take(request)
        while self._calls:
            await asyncio.wait(self._calls.values())

    def _take(self, request: token_streams_pb2.SequenceRequest) -> None:
        """Start, pause, resume or cancel a call.

        Raises OutriderError(PROTOCOL_VIOLATION).
        """
        number = request.call_id
        kind = request.WhichOneof("message")
        if kind == "generate":
            if number in self._calls:
                raise _violation(f"call_id {number} is that of a sequence that goes on")
            serving = self._serve(number, request.generate, request.traceparent)
            self._calls[number] = asyncio.create_task(serving)
            self._calls[number].add_done_callback(partial(self._forget, number))
        elif kind == "pause":
            if number in self._calls:
                self._paused.setdefault(number, asyncio.Event())
        elif kind == "resume":
            self._go_on(number)
        elif kind != "cancel":
            raise _violation("a message must be generate, cancel, pause or resume")
        elif call := self._calls.get(number):
            call.cancel()

    def _forget(self, number: int, _: object) -> None:
        del self._calls[number]
        self._go_on(number)

    def _go_on(self, number: int) -> None:
        """End the pause of a call, if it is paused."""
        if paused := self._paused.pop(number, None):
            paused.set()

    async def _serve(
        self, number: int, request: verifier_pb2.GenerateTokensRequest, traceparent: str
    ) -> None:
        """Serve one call, from its request to its last part; send nothing while it is paused."""
        try:
            async with aclosing(self._generate(request, traceparent)) as responses:
                async for response in responses:
                    while paused := self._paused.get(number):
                        await paused.wait()
                    self._send(token_streams_pb2.TokensPart(call_id=number, tokens=response))
                    if response.finish_reason:
                        return
            raise OutriderError(Reason.INTERNAL, "a sequence ended without a finish reason")
        except OutriderError as error:
            self._fail(number, error)
        except asyncio.CancelledError:
            # A caller that cancelled the call ignores this error. If the caller did not cancel the
            # call, the verifier is stopping.
            self._fail(number, OutriderError(Reason.DRAINING, "the verifier is about to stop"))
            raise
        # `unexpected` logs the exception; the caller gets INTERNAL.
        except Exception:  # noqa: BLE001
            self._fail(number, rpc_errors.unexpected("StreamTokens"))

    def _fail(self, number: int, error: OutriderError) -> None:
        status = rpc_errors.status_of(error).SerializeToString()
        self._send(token_streams_pb2.TokensPart(call_id=number, status=status))

    def _send(self, part: token_streams_pb2.TokensPart) -> None:
        """Queue a part for the next message. Too many unread parts end the stream."""
        if self._unsent_bytes > MOST_UNSENT_BYTES:
            self._unsent.clear()
            if not self._ended.done():
                message = f"{MOST_UNSENT_BYTES} bytes are unread, so the stream ends here"
                self._ended.set_exception(OutriderError(Reason.SLOW_READER, message))
            return
        self._unsent_bytes += part.ByteSize()
        self._unsent.append(part)
        self._has_unsent.set()

    async def _write(self) -> None:
        while not self._over:
            # All calls queue their parts of a step before the event loop runs this task again.
            await self._has_unsent.wait()
            self._has_unsent.clear()
            while self._unsent or self._draining:
                parts, byte_count = take_batch(self._unsent)
                self._unsent_bytes -= byte_count
                # A caller that reads `draining` may cancel its calls, so `draining` is sent with
                # the last of the parts that are queued, not before it.
                draining = self._draining and not self._unsent
                self._draining = self._draining and not draining
                await self._context.write(
                    token_streams_pb2.StreamTokensResponse(parts=parts, draining=draining)
                )


def agreed_version(gateway: Versions, own: Versions, context: Context) -> int:
    """Return the newest version that both speak; if there is none, log that and raise NOT_READY."""
    try:
        return link_versions.agree(gateway, own)
    except OutriderError as refusal:
        log.warning("the gateway at %s is refused: %s", context.peer(), refusal.message)
        raise


async def _cancel(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _violation(message: str) -> OutriderError:
    return OutriderError(Reason.PROTOCOL_VIOLATION, message)
