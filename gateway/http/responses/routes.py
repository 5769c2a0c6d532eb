"""POST /v1/responses, OpenAI's Responses API: a chat, asked and answered in other shapes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import NamedTuple

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from gateway.access.gate import identity_of
from gateway.generation.generate import Generation
from gateway.generation.serve_text import TextAnswer
from gateway.http.answering import answer_text, count_prompt
from gateway.http.ingress.json_body import JsonRoute
from gateway.http.ingress.request_body import MAX_BODY_BYTES
from gateway.http.openai.calls import ChatCall
from gateway.http.openai.error_fields import own_names
from gateway.http.openapi import STREAMED, json_responses
from gateway.http.responses.body import InputTokensBody, PromptBody, ResponsesBody
from gateway.http.responses.items import Item, ItemReference, kept_item
from gateway.http.responses.kept import add_kept_routes
from gateway.http.responses.output import Json
from gateway.http.responses.store import ResponseStore
from gateway.http.responses.writer import ResponseWriter
from gateway.http.streaming import AnswerWriter
from outrider.errors import invalid
from outrider.protocol.limits import MAX_MESSAGES

_COUNT_ERRORS = (400, 401, 404, 408, 413, 415, 429, 500, 503)
_ERRORS = (*_COUNT_ERRORS, 504)


class _Conversation(NamedTuple):
    """The items of a conversation, and the items as JSON."""

    items: list[Item]
    kept: list[bytes]


def _conversation(body: PromptBody, store: ResponseStore, tenant: str) -> _Conversation:
    """Return the kept conversation that the body continues, followed by the items of its input.

    Raises OutriderError(INVALID_VALUE) for items that are not kept, and for more items or bytes
    than a body could hold.
    """
    made = _Conversation([], [])
    kept_bytes = 0

    def add(kept: bytes, path: str) -> None:
        """Add a kept item and count its bytes, since a short body can refer to many long items."""
        nonlocal kept_bytes
        kept_bytes += len(kept)
        if kept_bytes > MAX_BODY_BYTES:
            raise invalid(path, f"continues a conversation of more than {MAX_BODY_BYTES} bytes")
        made.items.append(kept_item(json.loads(kept), path))
        made.kept.append(kept)

    previous = body.previous_response_id
    known = () if previous is None else store.conversation(tenant, previous)
    if known is None:
        raise invalid("previous_response_id", _not_kept("answer", str(previous)))
    count = len(known) + len(body.input)
    if count > MAX_MESSAGES:
        raise invalid("input", f"makes a conversation of {count} items, more than {MAX_MESSAGES}")
    for each in known:
        add(each, "previous_response_id")
    for index, item in enumerate(body.input):
        if isinstance(item, ItemReference):
            referred = store.item(tenant, item.id)
            if referred is None:
                raise invalid(f"input[{index}].id", _not_kept("item", item.id))
            add(referred, f"input[{index}]")
        else:
            made.items.append(item)
            made.kept.append(item.model_dump_json(exclude_none=True).encode())
    return made


def _not_kept(what: str, identifier: str) -> str:
    return (
        f"names no {what} that this gateway keeps for this caller: {identifier[:100]!r}; "
        "send the conversation's items in input instead"
    )


class ResponseCall(ChatCall):
    """POST /v1/responses."""

    def __init__(
        self,
        body: ResponsesBody,
        conversation: _Conversation,
        request: Request,
        store: ResponseStore,
        *,
        metrics: bool,
    ) -> None:
        """Raises OutriderError that names a parameter as a chat does."""
        super().__init__(body.asked(conversation.items), request, metrics=metrics)
        self._asked = body
        self._conversation = conversation
        self._store = store

    def writer(self, answer: TextAnswer) -> AnswerWriter:
        """Return the writer of an answer, which is kept unless the body says `store: false`."""

        def keep(response: Json, deltas: Sequence[Sequence[int]]) -> None:
            """Keep a complete answer."""
            if self._asked.keeps:
                before = self._conversation.kept
                self._store.add(self.identity.tenant, response, before, deltas)

        return ResponseWriter(self._asked, answer, self.request_id, keep, metrics=self.has_metrics)


def routes(generation: Generation, *, metrics: bool) -> APIRouter:
    """Return the endpoints of the Responses API. With `metrics`, all answers report speculation."""
    router = APIRouter(route_class=JsonRoute)
    store = ResponseStore()

    @router.post("/v1/responses", responses=json_responses(*_ERRORS, also=STREAMED))
    async def responses(body: ResponsesBody, request: Request) -> Response:
        """Answer a conversation of items."""
        with own_names(body.names):
            # Let other requests run between the steps, which take long for many items.
            await asyncio.sleep(0)
            conversation = _conversation(body, store, identity_of(request).tenant)
            await asyncio.sleep(0)
            call = ResponseCall(body, conversation, request, store, metrics=metrics)
            return await answer_text(generation, call)

    @router.post("/v1/responses/input_tokens", responses=json_responses(*_COUNT_ERRORS))
    async def input_tokens(body: InputTokensBody, request: Request) -> Response:
        """The number of a prompt's tokens, as an answer's `usage` counts them."""
        tenant = identity_of(request).tenant
        with own_names(body.names):
            await asyncio.sleep(0)
            conversation = _conversation(body, store, tenant)
            await asyncio.sleep(0)
            count = await count_prompt(generation, body.chat(conversation.items), tenant)
        return JSONResponse({"object": "response.input_tokens", "input_tokens": count})

    add_kept_routes(router, store)
    return router
