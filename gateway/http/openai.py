"""POST /v1/completions and /v1/chat/completions: OpenAI's requests, and OpenAI's answers."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from gateway.access.gate import Gate
from gateway.access.limits import Limits
from gateway.generation.generate import Generation
from gateway.generation.serve_text import TextAnswer, TextCall, serve_text
from gateway.http.calls import ChatCall, CompletionCall
from gateway.http.entrance import arrival_of
from gateway.http.json_body import JsonRoute
from gateway.http.openapi import STREAMED, json_responses
from gateway.http.responses import ChunkMaker, ResponseShape, attribution
from gateway.http.schema import ChatBody, CompletionBody, StreamOptions
from gateway.http.streaming import EventStream, sse, until_gone
from gateway.text.choices import WholeChoice, collect

_ERRORS = (400, 401, 404, 408, 413, 415, 429, 500, 503, 504)


def routes(generation: Generation, gate: Gate, *, metrics: bool) -> APIRouter:
    """The endpoints that generate text. With `metrics`, all answers report speculation."""
    router = APIRouter(route_class=JsonRoute)

    @router.post("/v1/completions", responses=json_responses(*_ERRORS, also=STREAMED))
    async def completions(body: CompletionBody, request: Request) -> Response:
        """Continue each prompt. `max_tokens` is 16 by default."""
        call = CompletionCall(body, request)
        return await _answer(generation, gate.limits, call, metrics or body.speculation.metrics)

    @router.post("/v1/chat/completions", responses=json_responses(*_ERRORS, also=STREAMED))
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        """Answer a conversation. `max_completion_tokens` is what the context leaves by default."""
        call = ChatCall(body, request)
        return await _answer(generation, gate.limits, call, metrics or body.speculation.metrics)

    return router


async def _answer(
    generation: Generation, limits: Limits, call: CompletionCall | ChatCall, has_metrics: bool
) -> Response:
    """Answer with one JSON object, or with a stream that closes the generation when it ends."""
    body = call.body
    async with AsyncExitStack() as stack:
        answer = await stack.enter_async_context(serve_text(generation, limits, call))
        arrival_of(call.request).done()
        shape = call.shape(answer.model, call.request_id)
        if not call.streams:
            collected = collect(answer.events, len(answer.totals.finishes))
            choices = await until_gone(call.request, collected)
            whole = _whole(body, shape, answer, choices)
            if has_metrics:
                whole["metrics"] = answer.totals.metrics()
            return JSONResponse(whole, headers=_headers(call, answer))
        # Await the first delta before the status line goes out, so that a refused request gets the
        # status of its error.
        first = await until_gone(call.request, anext(answer.events))
        maker = ChunkMaker(
            shape,
            answer.totals,
            body.stream_options or StreamOptions(),
            answer.prompt_lengths,
            metrics=has_metrics,
        )
        events = sse(first, answer.events, maker, answer.span)
        return EventStream(events, stack.pop_all(), _headers(call, answer))


def _headers(call: TextCall, answer: TextAnswer) -> dict[str, str]:
    """The answer's id, and what is left of the caller's limits."""
    return {"X-Request-Id": call.request_id, **answer.grant.headers}


def _whole(
    body: CompletionBody | ChatBody,
    shape: ResponseShape,
    answered: TextAnswer,
    choices: list[WholeChoice],
) -> dict[str, Any]:
    """The answer to a request that does not stream."""
    totals = answered.totals
    shown = [choice.shown for choice in choices]
    if isinstance(body, CompletionBody) and body.echo and body.logprobs is not None:
        shown = [choice.prompt + choice.shown for choice in choices]
    answer = shape.whole(choices, totals, shown)
    if body.prompt_logprobs is not None:
        shape.add_prompt_logprobs(answer, [choice.prompt for choice in choices])
    for written, choice in zip(answer["choices"], choices, strict=True):
        written |= attribution(choice.attributed)
    return answer | totals.speculation()
