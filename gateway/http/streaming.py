"""Write answers as server-sent events, and cancel work for clients that hang up."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable
from contextlib import AsyncExitStack
from typing import Any, Protocol, TypeVar

from fastapi import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from gateway.api_errors import unexpected
from gateway.text.choices import Event, WholeChoice
from gateway.text.deltas import TextDelta
from outrider.errors import OutriderError, Reason
from outrider.process.telemetry import Span

log = logging.getLogger(__name__)

_Result = TypeVar("_Result")
# `json.dumps` with separators would make an encoder for each event.
_ENCODER = json.JSONEncoder(separators=(",", ":"))


async def until_gone(request: Request, work: Awaitable[_Result]) -> _Result:
    """The result of `work`. If the client hangs up first, cancel it and raise CLIENT_GONE."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_hung_up(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise _client_gone()
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


def _client_gone() -> OutriderError:
    return OutriderError(Reason.CLIENT_GONE, "the client hung up before its answer was complete")


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def event(data: dict[str, Any], name: str = "") -> bytes:
    """One server-sent event in ASCII. Some clients end a line at U+2028 and similar characters."""
    named = f"event: {name}\n" if name else ""
    return f"{named}data: {_ENCODER.encode(data)}\n\n".encode()


class AnswerWriter(Protocol):
    """Writes one answer in an API's shape."""

    @property
    def is_complete(self) -> bool:
        """Whether the stream has all its events."""

    def whole(self, choices: list[WholeChoice]) -> dict[str, Any]:
        """The answer to a request that does not stream."""

    def events(self, index: int, delta: TextDelta) -> bytes:
        """The events of a choice's next delta; none if it has nothing to show.

        The first delta's events begin the stream, and the last delta's events end it.
        """

    def failure(self, error: OutriderError) -> bytes:
        """The events that end a stream which fails after its first event."""


class EventStream(StreamingResponse):
    """Streams events. Their end, or a client that hangs up, closes the answer they come from."""

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        answer: AsyncExitStack,
        headers: dict[str, str],
    ) -> None:
        unbuffered = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers | unbuffered)
        self._open = (events, answer)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            for part in self._open:
                await part.aclose()


async def sse(
    first: Event, rest: AsyncGenerator[Event, None], writer: AnswerWriter, span: Span
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a stream. An error becomes its last event."""
    try:
        item: Event | None = first
        while item is not None:
            if out := writer.events(*item):
                yield out
            item = await anext(rest, None)
    except (GeneratorExit, asyncio.CancelledError):
        # After the end of the answer, hanging up is no error.
        if not writer.is_complete:
            span.ended_by(_client_gone())
        raise
    except OutriderError as error:
        span.ended_by(error)
        yield writer.failure(error)
    # The status line is out, so the error can only be an event.
    except Exception as error:
        log.exception("a stream failed")
        span.ended_by(error)
        yield writer.failure(unexpected())
