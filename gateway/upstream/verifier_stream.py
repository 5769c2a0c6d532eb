"""Carries all sequences of a gateway at one verifier on one gRPC stream.

The tokens that a step of the verifier commits for these sequences arrive in one message.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextvars import Context
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import grpc

from outrider.errors import OutriderError, Reason
from outrider.internal.v1 import token_streams_pb2
from outrider.process.network import rpc, rpc_errors
from outrider.process.network.read_ahead import ReadAhead, ignore, unread_error
from outrider.process.tasks import watch
from outrider.protocol.messages import TokenChunk, TokenRequest
from outrider.protocol.wire import requests as wire_requests
from outrider.protocol.wire.batches import take_batch

if TYPE_CHECKING:
    # Only the type stubs have this class.
    from outrider.internal.v1.token_streams_pb2_grpc import TokenStreamServiceAsyncStub

# The maximum size of a message. A larger message would end the stream for all sequences.
_MOST_BYTES = rpc.MAX_MESSAGE_BYTES - 1024
# The maximum number of unread chunks of a sequence. It bounds the gateway's memory if a verifier
# goes on with a paused sequence.
_MOST_CHUNKS = 8192
_Chunks = ReadAhead[TokenChunk | OutriderError | None]
"""The chunks of one sequence. An error or None ends them; None means that the verifier hung up."""
_OnLost = Callable[[OutriderError], OutriderError]
# uvloop's timers overflow at the largest floats.
_LONGEST_S = 1e9
_HUNG_UP = OutriderError(Reason.VERIFIER_UNAVAILABLE, "the gateway has hung up")


class VerifierStream:
    """The stream to one verifier. A request opens the stream if it is not open or has broken."""

    def __init__(
        self,
        stub: TokenStreamServiceAsyncStub,
        on_lost: _OnLost,
        on_draining: Callable[[], None],
        version: Callable[[], int],
    ) -> None:
        """If the verifier is lost, `on_lost` gets the error and returns the error for callers.

        `on_draining` is called when the verifier says that it will leave soon. `version` returns
        the version of outrider.internal.v1 that was agreed with the verifier.
        """
        self._stub = stub
        self._on_lost = on_lost
        self._on_draining = on_draining
        self._version = version
        self._call: _StreamCall | None = None

    async def generate(
        self,
        request: TokenRequest,
        ends_at: float = math.inf,
        unread_s: float = _LONGEST_S,
        on_pause: Callable[[bool], object] = ignore,
    ) -> AsyncGenerator[TokenChunk, None]:
        """Yield the chunks of one sequence, up to the last or until the verifier hangs up.

        When MOST_UNREAD chunks wait to be read, the sequence is paused at the verifier, until only
        a few of them wait. `on_pause` is called with each change, see `ReadAhead`.
        Closing the iterator cancels the sequence. Raises OutriderError: the verifier's error,
        VERIFIER_UNAVAILABLE if the stream breaks, REQUEST_TOO_LARGE if the request does not fit in
        a message, SLOW_READER if the sequence is paused and nothing is read for `unread_s`, and
        DEADLINE_EXCEEDED at the monotonic time `ends_at`.
        """
        if self._call is None or self._call.ended:
            # The task gets an empty context: later log lines of the stream do not belong to this
            # request's trace.
            self._call = Context().run(
                _StreamCall, self._stub, self._on_lost, self._on_draining, self._version()
            )
        call = self._call
        call_id, chunks = call.begin(request, ends_at, unread_s, on_pause)
        try:
            while (chunk := await chunks.get()) is not None:
                if isinstance(chunk, OutriderError):
                    raise chunk
                yield chunk
                if chunk.finish_reason is not None:
                    return
        finally:
            call.end(call_id)

    def fail_sequences(self, error: OutriderError, *, waiting_only: bool) -> None:
        """End all sequences with an error; if `waiting_only`, only those without a chunk yet."""
        if self._call is not None:
            self._call.fail_sequences(error, waiting_only=waiting_only)

    async def finished(self) -> None:
        """Wait until no sequence is left."""
        if self._call is not None:
            await self._call.finished()

    async def close(self) -> None:
        """End all sequences and the stream."""
        if self._call is not None:
            await self._call.close()


class _StreamCall:
    """One gRPC call of StreamTokens, until it ends."""

    def __init__(
        self,
        stub: TokenStreamServiceAsyncStub,
        on_lost: _OnLost,
        on_draining: Callable[[], None],
        version: int,
    ) -> None:
        self._on_lost = on_lost
        self._on_draining = on_draining
        self._version = version
        self._last_id = 0
        self._running: dict[int, _Chunks] = {}
        # Running sequences without a chunk yet.
        self._waiting: set[int] = set()
        self._deadlines: dict[int, asyncio.TimerHandle] = {}
        self._empty = asyncio.Event()
        self._unsent: list[token_streams_pb2.SequenceRequest] = []
        self._has_unsent = asyncio.Event()
        self._hung_up = False
        self._call = stub.StreamTokens(self._requests())
        self._reading = watch(self._read(), "reading from a verifier")

    @property
    def ended(self) -> bool:
        """True if the call has ended, so that it can take no request."""
        return self._reading.done()

    def begin(
        self,
        request: TokenRequest,
        ends_at: float,
        unread_s: float,
        on_pause: Callable[[bool], object],
    ) -> tuple[int, _Chunks]:
        """Request a sequence, which fails at `ends_at`, or if it is unread for `unread_s`.

        Returns its call id and the queue of its chunks.
        """
        self._last_id += 1
        generate = wire_requests.request_to_proto(request)
        begin = token_streams_pb2.SequenceRequest(
            call_id=self._last_id, generate=generate, traceparent=request.traceparent
        )
        size = begin.ByteSize()
        if size > _MOST_BYTES:
            message = f"the request makes {size} bytes for the verifier, more than {_MOST_BYTES}"
            raise OutriderError(Reason.REQUEST_TOO_LARGE, message)
        self._send(begin)
        call_id = self._last_id
        chunks = _Chunks(
            partial(self._set_reading, call_id),
            lambda: self._fail(call_id, unread_error(unread_s)),
            unread_s,
            on_pause,
        )
        self._running[call_id] = chunks
        self._waiting.add(self._last_id)
        if ends_at < math.inf:
            left_s = min(ends_at - time.monotonic(), _LONGEST_S)
            loop = asyncio.get_running_loop()
            self._deadlines[self._last_id] = loop.call_later(
                left_s, self._fail, self._last_id, late()
            )
        return self._last_id, chunks

    def end(self, call_id: int) -> None:
        """Forget a sequence. If the sequence still runs, cancel it at the verifier."""
        if self._forget(call_id):
            cancel = token_streams_pb2.CancelTokens()
            self._send(token_streams_pb2.SequenceRequest(call_id=call_id, cancel=cancel))

    def _set_reading(self, call_id: int, reads: bool) -> None:
        """Tell the verifier whether this sequence's chunks are being read."""
        said = token_streams_pb2.SequenceRequest(call_id=call_id)
        if reads:
            said.resume.SetInParent()
        else:
            said.pause.SetInParent()
        self._send(said)

    def _send(self, request: token_streams_pb2.SequenceRequest) -> None:
        """Send a request soon, in one message with the requests that wait."""
        self._unsent.append(request)
        self._has_unsent.set()

    def _forget(self, call_id: int) -> bool:
        """Forget a sequence. Return whether the sequence was running."""
        self._waiting.discard(call_id)
        deadline = self._deadlines.pop(call_id, None)
        if deadline is not None:
            deadline.cancel()
        chunks = self._running.pop(call_id, None)
        if chunks is not None:
            chunks.close()
        if not self._running:
            self._empty.set()
        return chunks is not None

    def fail_sequences(self, error: OutriderError, *, waiting_only: bool) -> None:
        """End all sequences with an error; if `waiting_only`, only those without a chunk yet."""
        for call_id in list(self._waiting if waiting_only else self._running):
            self._fail(call_id, replace(error))

    def _fail(self, call_id: int, error: OutriderError) -> None:
        """End a sequence with an error, even if its caller does not read."""
        self._running[call_id].put(error)
        self.end(call_id)

    async def finished(self) -> None:
        """Wait until no sequence is left or the call has ended."""
        while self._running and not self.ended:
            self._empty.clear()
            await self._empty.wait()

    async def close(self) -> None:
        """End all sequences and the call."""
        self._reading.cancel()
        await asyncio.wait({self._reading})
        # A task that is cancelled before it starts does not hang up, so `close` does.
        self._hang_up(_HUNG_UP)

    async def _requests(self) -> AsyncIterator[token_streams_pb2.StreamTokensRequest]:
        # Sending a message takes rounds of the event loop. In a burst, requests sent one by one
        # would fall behind, and another tenant's request would wait for the whole burst.
        while not self._hung_up:
            await self._has_unsent.wait()
            self._has_unsent.clear()
            while self._unsent:
                batch, _ = take_batch(self._unsent)
                yield token_streams_pb2.StreamTokensRequest(requests=batch, version=self._version)

    async def _read(self) -> None:
        error: OutriderError | None = _HUNG_UP
        try:
            async for response in self._call:
                readable = rpc_errors.readable(response)
                if readable.draining:
                    self._on_draining()
                for part in readable.parts:
                    chunks = self._running.get(part.call_id)
                    # Tokens of a cancelled sequence may have been on their way.
                    if chunks is not None:
                        self._add(part, chunks)
            error = None
        except grpc.aio.AioRpcError as failure:
            error = rpc_errors.error_of(failure)
            # A verifier of another version may lack the call.
            gone = failure.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNIMPLEMENTED)
            if gone and error.reason is Reason.VERIFIER_UNAVAILABLE:
                error = self._on_lost(error)
            elif error.reason is Reason.SLOW_READER:
                # The gateway itself read too slowly, not its clients. The sequences therefore go on
                # in a new call.
                error = replace(error, reason=Reason.VERIFIER_UNAVAILABLE)
        except OutriderError as violation:
            # The gateway's caller is not at fault.
            message = f"the verifier's stream is broken: {violation.message}"
            error = OutriderError(Reason.INTERNAL, message)
        except Exception:  # noqa: BLE001  # `unexpected` logs any other failure, and gives INTERNAL
            error = rpc_errors.unexpected("StreamTokens")
        finally:
            self._hang_up(error)

    def _add(self, part: token_streams_pb2.TokensPart, chunks: _Chunks) -> None:
        # Queue a decoded copy: the part itself would keep the whole message in memory.
        chunk = _decode(part)
        self._waiting.discard(part.call_id)
        if part.HasField("status") or part.tokens.finish_reason:
            self._forget(part.call_id)
        elif isinstance(chunk, OutriderError):
            self.end(part.call_id)
        elif len(chunks) >= _MOST_CHUNKS:
            message = "the verifier goes on with a sequence that is paused"
            chunk = OutriderError(Reason.INTERNAL, message)
            self.end(part.call_id)
        chunks.put(chunk)

    def _hang_up(self, error: OutriderError | None) -> None:
        """End the call, and all sequences with an error or None."""
        self._call.cancel()
        # gRPC waits for requests even after a call has ended.
        self._hung_up = True
        self._has_unsent.set()
        for chunks in self._running.values():
            chunks.close()
            chunks.put(error and replace(error))
        for deadline in self._deadlines.values():
            deadline.cancel()
        self._deadlines.clear()
        self._waiting.clear()
        self._empty.set()


def late() -> OutriderError:
    """Return the error of a request whose deadline has passed."""
    message = "the answer was not complete within the request's timeout"
    return OutriderError(Reason.DEADLINE_EXCEEDED, message)


def _decode(part: token_streams_pb2.TokensPart) -> TokenChunk | OutriderError:
    """Return the chunk or the error of a part.

    An invalid part fails its sequence, not the stream.
    """
    try:
        if part.HasField("status"):
            # Drop the verifier's metadata, which would become HTTP headers.
            return replace(rpc_errors.error_in(part.status), metadata={})
        return wire_requests.chunk_from_proto(part.tokens)
    except Exception:  # noqa: BLE001  # `unexpected` logs the failure, and gives INTERNAL
        return rpc_errors.unexpected("StreamTokens")
