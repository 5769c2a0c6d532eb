"""POST /v1/messages and its count_tokens: Anthropic's requests, answered as chats are."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from gateway.access.gate import identity_of
from gateway.access_log import current
from gateway.generation.generate import Generation
from gateway.generation.serve_text import TextAnswer
from gateway.http.answering import answer_text, count_prompt
from gateway.http.ingress.json_body import JsonRoute
from gateway.http.messages.body import NAMES, CountTokensBody, MessagesBody
from gateway.http.messages.writer import MessagesWriter
from gateway.http.openai.calls import ChatCall
from gateway.http.openai.error_fields import own_names
from gateway.http.openai.schema import ChatBody
from gateway.http.openapi import STREAMED, json_responses
from gateway.text.request import AnswerLimit

_ERRORS = (400, 401, 404, 408, 413, 415, 429, 500, 503)


class MessagesCall(ChatCall):
    """POST /v1/messages."""

    def __init__(self, body: ChatBody, request: Request, max_tokens: int, *, metrics: bool) -> None:
        """`body` is the translated body, and `max_tokens` the limit in the received body."""
        super().__init__(body, request, metrics=metrics)
        self._max_tokens = max_tokens
        # As at Anthropic, a limit beyond the context is no error. The answer then ends where the
        # context is full.
        self.limit = AnswerLimit(None, default=max_tokens)

    def writer(self, answer: TextAnswer) -> MessagesWriter:
        """Return the writer of answers in Anthropic's shape."""
        return MessagesWriter(answer, self.request_id, self._max_tokens, metrics=self.has_metrics)


def routes(generation: Generation, *, metrics: bool) -> APIRouter:
    """Return the endpoints of Anthropic's API. With `metrics`, all answers report speculation."""
    router = APIRouter(route_class=JsonRoute)

    @router.post(
        "/v1/messages",
        responses=json_responses(*_ERRORS, 504, also=STREAMED, shape="MessagesError"),
    )
    async def messages(body: MessagesBody, request: Request) -> Response:
        """Answer a conversation in Anthropic's shape."""
        chat = await body.answered()
        call = MessagesCall(chat, request, body.max_tokens, metrics=metrics)
        with own_names(NAMES):
            response = await answer_text(generation, call)
        response.headers["request-id"] = call.request_id
        return response

    @router.post(
        "/v1/messages/count_tokens", responses=json_responses(*_ERRORS, shape="MessagesError")
    )
    async def count_tokens(body: CountTokensBody, request: Request) -> Response:
        """The number of a prompt's tokens, as an answer's `usage` counts them."""
        tenant = identity_of(request).tenant
        with own_names(NAMES):
            count = await count_prompt(generation, await body.chat(), tenant)
        headers = {"request-id": current().request_id}
        return JSONResponse({"input_tokens": count}, headers=headers)

    return router
