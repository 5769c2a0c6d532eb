"""Many sequences of one caller on one stream: what steps commit for them goes out in as few messages as it can.

A message costs the event loops at its ends some hundred microseconds, many times what is in it; and where verifier and gateway
share the target's cores, all of that is taken from the forward. Knows no engine: a call is whatever yields responses.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from functools import partial
from typing import Any

import grpc

from outrider.errors import OutriderError, Reason
from outrider.internal.v1 import token_streams_pb2
from outrider.process import rpc
from outrider.v1 import verifier_pb2

# What a message has at most, unless one part alone is larger.
_MESSAGE_BYTES = 2**20

Requests = AsyncIterator[token_streams_pb2.StreamTokensRequest]
Context = grpc.aio.ServicerContext[Any, Any]
Generate = Callable[
    [verifier_pb2.GenerateTokensRequest, str],
    AsyncGenerator[verifier_pb2.GenerateTokensResponse, None],
]
"""What answers one request, with its traceparent; raises OutriderError."""


class TokenStream:
    """One caller's stream."""

    def __init__(self, generate: Generate, requests: Requests, context: Context) -> None:
        self._generate = generate
        self._requests = requests
        self._context = context
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._unsent: list[token_streams_pb2.TokensPart] = []
        self._said = asyncio.Event()
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._over = False

    async def run(self) -> None:
        """Serve until the caller ends the stream, or `end`; raises OutriderError for a message that has no meaning."""
        # The first message would bring it, and so would a status: gRPC refuses one while such a message is being written.
        await self._context.send_initial_metadata(())
        reading, writing = asyncio.create_task(self._read()), asyncio.create_task(self._write())
        try:
            await asyncio.wait({reading, writing, self._ended}, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                reading.result()
            await _cancel(*self._calls.values())
            self._over = True
            self._said.set()
            await writing
        finally:
            await _cancel(reading, writing, *self._calls.values())

    def end(self) -> None:
        """Send what was said and hang up; what still goes on is cut off."""
        if not self._ended.done():
            self._ended.set_result(None)

    async def _read(self) -> None:
        """Begin and cancel calls; when no more will come, wait for those that go on."""
        async for request in self._requests:
            number, kind = request.call_id, request.WhichOneof("message")
            if kind == "generate":
                if number in self._calls:
                    raise _violation(f"call_id {number} is that of a sequence that goes on")
                self._calls[number] = asyncio.create_task(
                    self._serve(number, request.generate, request.traceparent)
                )
                self._calls[number].add_done_callback(partial(self._forget, number))
            elif kind != "cancel":
                raise _violation("a message must be generate or cancel")
            elif call := self._calls.get(number):
                call.cancel()
        while self._calls:
            await asyncio.wait(self._calls.values())

    def _forget(self, number: int, _: object) -> None:
        del self._calls[number]

    async def _serve(
        self, number: int, request: verifier_pb2.GenerateTokensRequest, traceparent: str
    ) -> None:
        """One call, from its request to its last part."""
        try:
            async with aclosing(self._generate(request, traceparent)) as responses:
                async for response in responses:
                    self._say(token_streams_pb2.TokensPart(call_id=number, tokens=response))
                    if response.finish_reason:
                        return
            raise OutriderError(Reason.INTERNAL, "a sequence ended without a finish reason")
        except OutriderError as error:
            self._fail(number, error)
        except asyncio.CancelledError:
            # If it was the caller who freed it, nobody listens any more.
            self._fail(number, OutriderError(Reason.DRAINING, "the verifier is about to stop"))
            raise
        except Exception:  # noqa: BLE001  # logged, and answered with INTERNAL
            self._fail(number, rpc.unexpected("StreamTokens"))

    def _fail(self, number: int, error: OutriderError) -> None:
        self._say(
            token_streams_pb2.TokensPart(
                call_id=number, status=rpc.status_of(error).SerializeToString()
            )
        )

    def _say(self, part: token_streams_pb2.TokensPart) -> None:
        self._unsent.append(part)
        self._said.set()

    async def _write(self) -> None:
        while not self._over:
            # Whoever has something to say after a step says it before this task has its turn.
            await self._said.wait()
            self._said.clear()
            while self._unsent:
                count, size = 1, self._unsent[0].ByteSize()
                while (
                    count < len(self._unsent)
                    and (size := size + self._unsent[count].ByteSize()) <= _MESSAGE_BYTES
                ):
                    count += 1
                parts, self._unsent = self._unsent[:count], self._unsent[count:]
                await self._context.write(token_streams_pb2.StreamTokensResponse(parts=parts))


async def _cancel(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _violation(message: str) -> OutriderError:
    return OutriderError(Reason.PROTOCOL_VIOLATION, message)
