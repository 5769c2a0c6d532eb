"""Write answers as server-sent events, and cancel work for clients that hang up."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import AsyncExitStack
from typing import TypeVar

from fastapi import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from gateway.api_errors import error_body, unexpected
from gateway.http.responses import Json, ResponseShape, attribution
from gateway.http.schema import StreamOptions
from gateway.text.choices import Event, UsageTotals
from gateway.text.deltas import FinishInfo, TextDelta
from outrider.errors import OutriderError, Reason
from outrider.process.telemetry import Span

log = logging.getLogger(__name__)

_Result = TypeVar("_Result")
DONE = b"data: [DONE]\n\n"
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


def event(data: Json) -> bytes:
    """One server-sent event in ASCII. Some clients end a line at U+2028 and similar characters."""
    return b"data: " + _ENCODER.encode(data).encode() + b"\n\n"


class EventStream(StreamingResponse):
    """Streams events. Their end, or a client that hangs up, closes the answer behind them."""

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


class ChunkWriter:
    """Writes a request's events as the chunks of its endpoint.

    `prompt_lengths` has each choice's number of prompt tokens, for vLLM's `continuous_usage_stats`.
    """

    def __init__(
        self,
        shape: ResponseShape,
        totals: UsageTotals,
        options: StreamOptions,
        prompt_lengths: Sequence[int],
        *,
        metrics: bool,
    ) -> None:
        self.shape = shape
        self.totals = totals
        self._options = options
        self._prompt_lengths = prompt_lengths
        self._include_metrics = metrics
        self._token_counts = [0] * len(totals.finishes)
        self._opened: set[int] = set()
        self._open_count = len(totals.finishes)

    @property
    def complete(self) -> bool:
        """Whether every choice has ended."""
        return self._open_count == 0

    def write(self, index: int, delta: TextDelta) -> bytes:
        """The events for a delta; empty if it has nothing to show.

        A delta may have log probabilities without text, while the text is held back.
        """
        out = b""
        if index not in self._opened:
            self._opened.add(index)
            if self.shape.opening is not None:
                out = event(self.shape.chunk(index, self.shape.opening) | self._usage(index))
        self._token_counts[index] += len(delta.token_ids)
        # In a stream a prompt is scored only for an echo, so its tokens belong to the output.
        shown = [*delta.prompt, *delta.shown]
        if delta.text or shown or delta.attributed:
            logprobs = self.shape.logprobs(shown)
            content = self.shape.delta(delta.text) | attribution(delta.attributed)
            out += event(self.shape.chunk(index, content, logprobs=logprobs) | self._usage(index))
        return out if delta.finish is None else out + self._close(index, delta.finish)

    def _usage(self, index: int) -> Json:
        """The `usage` field of a chunk: vLLM's usage of the choice so far, or OpenAI's null."""
        if not self._options.include_usage:
            return {}
        if not self._options.continuous_usage_stats:
            return {"usage": None}
        prompt = self._prompt_lengths[index]
        completion = self._token_counts[index]
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }
        return {"usage": usage}

    def _close(self, index: int, finish: FinishInfo) -> bytes:
        """The events that end a choice, and after the last choice also the stream."""
        closing = self.shape.chunk(index, self.shape.closing, finish) | self._usage(index)
        self._open_count -= 1
        if self._open_count:
            return event(closing)
        extra = self.totals.speculation()
        if self._include_metrics:
            extra["metrics"] = self.totals.metrics()
        if not self._options.include_usage:
            return event(closing | extra) + DONE
        return event(closing) + event(self.shape.usage_chunk(self.totals.usage()) | extra) + DONE


async def sse(
    first: Event, rest: AsyncGenerator[Event, None], writer: ChunkWriter, span: Span
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a stream. An error becomes its last event but `[DONE]`, as in vLLM.

    Its shape is OpenAI's.
    """
    try:
        item: Event | None = first
        while item is not None:
            out = writer.write(*item)
            if out:
                yield out
            item = await anext(rest, None)
    except (GeneratorExit, asyncio.CancelledError):
        # After the end of the answer, hanging up is no error.
        if not writer.complete:
            span.ended_by(_client_gone())
        raise
    except OutriderError as error:
        span.ended_by(error)
        yield event(error_body(error)) + DONE
    # The status line is out, so the error can only be an event.
    except Exception as error:
        log.exception("a stream failed")
        span.ended_by(error)
        yield event(error_body(unexpected())) + DONE
