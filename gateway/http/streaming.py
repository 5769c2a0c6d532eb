"""Streams answers as server-sent events, until they end or the client disconnects."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import AsyncGenerator, Awaitable
from contextlib import AsyncExitStack
from typing import Any, Protocol

from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from gateway.api_errors import unexpected
from gateway.http.disconnects import client_gone_error
from gateway.text.choices import Event, WholeChoice
from gateway.text.deltas import TextDelta
from outrider.errors import OutriderError
from outrider.process.observability.telemetry import Span

log = logging.getLogger(__name__)

# Pings: a comment, which clients skip, and Anthropic's event.
_PING = b": ping\n\n"
_MESSAGES_PING = b'event: ping\ndata: {"type": "ping"}\n\n'
# `json.dumps` with separators would make an encoder for each event.
_ENCODER = json.JSONEncoder(separators=(",", ":"))


def event(data: dict[str, Any], name: str = "") -> bytes:
    """Return one server-sent event.

    The event is ASCII, because some clients end a line at U+2028 and similar characters.
    """
    named = f"event: {name}\n" if name else ""
    return f"{named}data: {_ENCODER.encode(data)}\n\n".encode()


class AnswerWriter(Protocol):
    """Writes one answer in an API's shape."""

    @property
    def is_complete(self) -> bool:
        """True once the last event of the stream has been returned."""

    def whole(self, choices: list[WholeChoice]) -> dict[str, Any]:
        """Return the answer to a request that does not stream."""

    def events(self, index: int, delta: TextDelta) -> bytes:
        """Return the events of a choice's next delta; none if the delta has nothing to show.

        The first delta's events begin the stream, and the last delta's events end it.
        """

    def failure(self, error: OutriderError) -> bytes:
        """Return the events that end a stream which fails after its status line was sent."""


class EventStream(StreamingResponse):
    """Streams events, and closes the answer when the events end or the client disconnects.

    While there are no events, the response sends pings, so that no proxy takes the connection for
    dead.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], answer: AsyncExitStack) -> None:
        unbuffered = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=unbuffered)
        self._open = (events, answer)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        ping = _MESSAGES_PING if scope["path"].startswith("/v1/messages") else _PING
        pings = _Pings(send, ping, ping_seconds(scope))
        pinging = asyncio.ensure_future(pings.run())
        try:
            await super().__call__(scope, receive, pings.send)
        finally:
            pinging.cancel()
            for part in self._open:
                await part.aclose()


def ping_seconds(scope: Scope) -> float:
    """Return after how many seconds of silence a stream sends a ping; infinity if it sends none."""
    return scope["app"].state.ping_seconds or math.inf


class _Pings:
    """Sends a ping whenever a stream has sent nothing for `every_s`."""

    def __init__(self, send: Send, ping: bytes, every_s: float) -> None:
        self._send = send
        self._message: Message = {"type": "http.response.body", "body": ping, "more_body": True}
        self._every_s = every_s
        self._sent_at = asyncio.get_running_loop().time()
        # No ping may be sent before the status, after the end, or while nobody reads.
        self._may_ping = False

    async def send(self, message: Message) -> None:
        """Send a message of the stream."""
        self._may_ping = False
        await self._send(message)
        self._sent_at = asyncio.get_running_loop().time()
        self._may_ping = message["type"] == "http.response.start" or message["more_body"]

    async def run(self) -> None:
        """Send pings until cancelled."""
        while self._every_s < math.inf:
            pause_s = asyncio.get_running_loop().time() - self._sent_at
            if pause_s < self._every_s:
                await asyncio.sleep(self._every_s - pause_s)
            elif self._may_ping:
                await self.send(self._message)
            else:
                await asyncio.sleep(self._every_s)


async def sse(
    first: Awaitable[Event], rest: AsyncGenerator[Event, None], writer: AnswerWriter, span: Span
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a stream. An error becomes its last event."""
    try:
        item: Event | None = await first
        while item is not None:
            if out := writer.events(*item):
                yield out
            item = await anext(rest, None)
    except (GeneratorExit, asyncio.CancelledError):
        # It is no error if a client disconnects after the end of the answer.
        if not writer.is_complete:
            span.ended_by(client_gone_error())
        raise
    except OutriderError as error:
        span.ended_by(error)
        yield writer.failure(error)
    # The status line has been sent, so the error can only be an event.
    except Exception as error:
        log.exception("a stream failed")
        span.ended_by(error)
        yield writer.failure(unexpected())
