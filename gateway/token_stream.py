"""A gateway's sequences at one verifier, all on one stream: what a step commits for them comes in one message."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextvars import Context
from dataclasses import replace
from typing import TYPE_CHECKING

import grpc

from outrider.errors import OutriderError, Reason
from outrider.internal.v1 import token_streams_pb2
from outrider.messages import TokenChunk, TokenRequest
from outrider.process import rpc
from outrider.process.tasks import watch
from outrider.wire import requests as wire_requests

if TYPE_CHECKING:
    from outrider.internal.v1.token_streams_pb2_grpc import (
        TokenStreamServiceAsyncStub,
    )  # which only the type stubs have

# So that no request can end the stream for the others.
_MOST_BYTES = rpc.MAX_MESSAGE_BYTES - 1024
# What one sequence's client leaves unread cannot hold up the stream, and must not fill the gateway's memory either.
MOST_UNREAD_CHUNKS = 8192
_Said = asyncio.Queue[TokenChunk | OutriderError | None]
_OnLost = Callable[[OutriderError], OutriderError]
_HUNG_UP = OutriderError(Reason.VERIFIER_UNAVAILABLE, "the gateway has hung up")


class TokenStream:
    """Opened by the first request, and again by the first one after it broke."""

    def __init__(self, stub: TokenStreamServiceAsyncStub, on_lost: _OnLost) -> None:
        """`on_lost` hears why the verifier cannot be reached, and says what callers are to be told."""
        self._stub = stub
        self._on_lost = on_lost
        self._link: _Link | None = None

    async def generate(self, request: TokenRequest) -> AsyncGenerator[TokenChunk, None]:
        """The chunks of one sequence, to its last or to where the verifier hung up; closing the iterator frees the sequence.

        Raises OutriderError: what the verifier reports, VERIFIER_UNAVAILABLE when the stream breaks, REQUEST_TOO_LARGE, and
        SLOW_READER after MOST_UNREAD_CHUNKS that were not asked for.
        """
        if self._link is None or self._link.over:
            # Not in the context of the request that happens to be the first: what is logged later is not of its trace.
            self._link = Context().run(_Link, self._stub, self._on_lost)
        link, number, said = self._link, *self._link.begin(request)
        try:
            while (chunk := await said.get()) is not None:
                if isinstance(chunk, OutriderError):
                    raise chunk
                yield chunk
                if chunk.finish_reason is not None:
                    return
        finally:
            link.end(number)

    def give_up(self, why: OutriderError, *, waiting_only: bool) -> None:
        """End all sequences with an error, or those of which nothing has been said yet."""
        if self._link is not None:
            self._link.give_up(why, waiting_only=waiting_only)

    async def finished(self) -> None:
        """Wait until no sequence is left."""
        if self._link is not None:
            await self._link.finished()

    async def close(self) -> None:
        """Free all sequences and hang up."""
        if self._link is not None:
            await self._link.close()


class _Link:
    """One call of StreamTokens, until it ends."""

    def __init__(self, stub: TokenStreamServiceAsyncStub, on_lost: _OnLost) -> None:
        self._on_lost = on_lost
        self._last = 0
        self._going_on: dict[int, _Said] = {}
        # Sequences of which nothing has been said yet.
        self._waiting: set[int] = set()
        self._empty = asyncio.Event()
        self._unsent: asyncio.Queue[token_streams_pb2.StreamTokensRequest | None] = asyncio.Queue()
        self._call = stub.StreamTokens(self._requests())
        self._reading = watch(self._read(), "reading from a verifier")

    @property
    def over(self) -> bool:
        return self._reading.done()

    def begin(self, request: TokenRequest) -> tuple[int, _Said]:
        """Ask for a sequence: its number, and where what is said of it comes; None when the verifier has hung up."""
        self._last += 1
        generate = wire_requests.request_to_proto(request)
        begin = token_streams_pb2.StreamTokensRequest(
            call_id=self._last, generate=generate, traceparent=request.traceparent
        )
        if (size := begin.ByteSize()) > _MOST_BYTES:
            raise OutriderError(
                Reason.REQUEST_TOO_LARGE,
                f"the request makes {size} bytes for the verifier, more than {_MOST_BYTES}",
            )
        self._unsent.put_nowait(begin)
        said = self._going_on[self._last] = _Said()
        self._waiting.add(self._last)
        return self._last, said

    def end(self, number: int) -> None:
        """Forget a sequence, and free it if it goes on."""
        if self._forget(number) is not None:
            self._unsent.put_nowait(
                token_streams_pb2.StreamTokensRequest(
                    call_id=number, cancel=token_streams_pb2.CancelTokens()
                )
            )

    def _forget(self, number: int) -> _Said | None:
        self._waiting.discard(number)
        said = self._going_on.pop(number, None)
        if not self._going_on:
            self._empty.set()
        return said

    def give_up(self, why: OutriderError, *, waiting_only: bool) -> None:
        for number in list(self._waiting if waiting_only else self._going_on):
            self._going_on[number].put_nowait(replace(why))
            self.end(number)

    async def finished(self) -> None:
        while self._going_on and not self.over:
            self._empty.clear()
            await self._empty.wait()

    async def close(self) -> None:
        self._reading.cancel()
        await asyncio.wait({self._reading})
        # In case it had not begun.
        self._hang_up(_HUNG_UP)

    async def _requests(self) -> AsyncIterator[token_streams_pb2.StreamTokensRequest]:
        while (request := await self._unsent.get()) is not None:
            yield request

    async def _read(self) -> None:
        why: OutriderError | None = _HUNG_UP
        try:
            async for response in self._call:
                for part in response.parts:
                    # What was freed meanwhile may still be spoken of.
                    if (said := self._going_on.get(part.call_id)) is not None:
                        self._take(part, said)
            why = None
        except grpc.aio.AioRpcError as failure:
            why = rpc.error_of(failure)
            # A verifier of another version may lack the call.
            gone = failure.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNIMPLEMENTED)
            if gone and why.reason is Reason.VERIFIER_UNAVAILABLE:
                why = self._on_lost(why)
        except Exception:  # noqa: BLE001  # logged, and answered with INTERNAL
            why = rpc.unexpected("StreamTokens")
        finally:
            self._hang_up(why)

    def _take(self, part: token_streams_pb2.TokensPart, said: _Said) -> None:
        # Not the part itself, which would keep what was said of all others in the same message.
        chunk = _meaning(part)
        self._waiting.discard(part.call_id)
        if part.HasField("status") or part.tokens.finish_reason:
            self._forget(part.call_id)
        elif isinstance(chunk, OutriderError):
            self.end(part.call_id)
        elif said.qsize() >= MOST_UNREAD_CHUNKS:
            chunk = OutriderError(
                Reason.SLOW_READER,
                f"{MOST_UNREAD_CHUNKS} chunks of the answer are unread, so it ends here",
            )
            self.end(part.call_id)
        said.put_nowait(chunk)

    def _hang_up(self, why: OutriderError | None) -> None:
        self._call.cancel()
        # gRPC goes on to wait for requests after a call has ended.
        self._unsent.put_nowait(None)
        for said in self._going_on.values():
            said.put_nowait(why and replace(why))
        self._waiting.clear()
        self._empty.set()


def _meaning(part: token_streams_pb2.TokensPart) -> TokenChunk | OutriderError:
    """What a part says; that it cannot be made out is its own sequence's failure, and not the stream's."""
    try:
        return (
            rpc.error_in(part.status)
            if part.HasField("status")
            else wire_requests.chunk_from_proto(part.tokens)
        )
    except Exception:  # noqa: BLE001  # logged, and answered with INTERNAL
        return rpc.unexpected("StreamTokens")
