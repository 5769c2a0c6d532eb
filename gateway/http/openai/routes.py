"""POST /v1/completions and /v1/chat/completions: OpenAI's requests, and OpenAI's answers."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from gateway.generation.generate import Generation
from gateway.http.answering import answer_text
from gateway.http.ingress.json_body import JsonRoute
from gateway.http.openai.calls import ChatCall, CompletionCall
from gateway.http.openai.schema import ChatBody, CompletionBody
from gateway.http.openapi import STREAMED, json_responses

_ERRORS = (400, 401, 404, 408, 413, 415, 429, 500, 503, 504)


def routes(generation: Generation, *, metrics: bool) -> APIRouter:
    """Return the endpoints that generate text. With `metrics`, all answers report speculation."""
    router = APIRouter(route_class=JsonRoute)

    @router.post("/v1/completions", responses=json_responses(*_ERRORS, also=STREAMED))
    async def completions(body: CompletionBody, request: Request) -> Response:
        """Continue each prompt. `max_tokens` is 16 by default."""
        call = CompletionCall(body, request, metrics=metrics)
        return await answer_text(generation, call)

    @router.post("/v1/chat/completions", responses=json_responses(*_ERRORS, also=STREAMED))
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        """Answer a conversation. By default, the answer may fill the rest of the context."""
        call = ChatCall(body, request, metrics=metrics)
        return await answer_text(generation, call)

    return router
