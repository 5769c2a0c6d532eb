"""POST /v1/responses, OpenAI's Responses API: a chat, asked and answered in other shapes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from gateway.access.gate import Gate, identity_of
from gateway.generation.generate import Generation
from gateway.generation.serve_text import TextAnswer
from gateway.http.answering import answer_text
from gateway.http.calls import ChatCall
from gateway.http.json_body import JsonRoute
from gateway.http.openapi import STREAMED, json_responses
from gateway.http.request_body import MAX_BODY_BYTES
from gateway.http.responses_body import ResponsesBody, renamed
from gateway.http.responses_items import Item, ItemReference, kept_item
from gateway.http.responses_output import Json
from gateway.http.responses_store import ResponseStore
from gateway.http.responses_writer import ResponseWriter
from gateway.http.streaming import AnswerWriter
from outrider.errors import OutriderError, Reason, invalid
from outrider.protocol.limits import MAX_MESSAGES

_ERRORS = (400, 401, 404, 408, 413, 415, 429, 500, 503, 504)


class _Conversation(NamedTuple):
    """The items of a conversation, and the same as JSON."""

    items: list[Item]
    kept: list[bytes]


def _conversation(body: ResponsesBody, store: ResponseStore, tenant: str) -> _Conversation:
    """The kept conversation that the body continues, and the items of its input.

    Raises OutriderError(INVALID_VALUE) for what is not kept, and for more than a body could hold.
    """
    made = _Conversation([], [])
    kept_bytes = 0

    def add(kept: bytes, path: str) -> None:
        """Add a kept item. References make a short body a long conversation, so count."""
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
        raise invalid("input", f"makes {count} items of the conversation, over {MAX_MESSAGES}")
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
        super().__init__(body.chat(conversation.items), request, metrics=metrics)
        self._asked = body
        self._conversation = conversation
        self._store = store

    def writer(self, answer: TextAnswer) -> AnswerWriter:
        """The Responses API's answer, which is kept unless the body says `store: false`."""

        def keep(response: Json) -> None:
            """Keep a complete answer."""
            if self._asked.keeps:
                self._store.add(self.identity.tenant, response, self._conversation.kept)

        return ResponseWriter(self._asked, answer, self.request_id, keep, metrics=self.has_metrics)


@contextmanager
def _in_own_terms(body: ResponsesBody) -> Iterator[None]:
    """Rename the parameters in errors of the block."""
    try:
        yield
    except OutriderError as error:
        raise renamed(error, body.tools.flat) from error


def routes(generation: Generation, gate: Gate, *, metrics: bool) -> APIRouter:
    """The endpoints of the Responses API. With `metrics`, all answers report speculation."""
    router = APIRouter(route_class=JsonRoute)
    store = ResponseStore()

    @router.post("/v1/responses", responses=json_responses(*_ERRORS, also=STREAMED))
    async def responses(body: ResponsesBody, request: Request) -> Response:
        """Answer a conversation of items."""
        with _in_own_terms(body):
            # Let other requests run between the steps, which take long for many items.
            await asyncio.sleep(0)
            conversation = _conversation(body, store, identity_of(request).tenant)
            await asyncio.sleep(0)
            call = ResponseCall(body, conversation, request, store, metrics=metrics)
            return await answer_text(generation, gate.limits, call)

    @router.get("/v1/responses/{response_id}", responses=json_responses(401, 404))
    async def kept_response(response_id: str, request: Request) -> Response:
        """A response that is still kept."""
        found = store.response(identity_of(request).tenant, response_id)
        if found is None:
            raise _no_response(response_id)
        return Response(found, media_type="application/json")

    router.add_api_route(
        "/v1/responses/{response_id}", kept_response, methods=["HEAD"], include_in_schema=False
    )

    @router.delete("/v1/responses/{response_id}", responses=json_responses(401, 404))
    async def delete_response(response_id: str, request: Request) -> Response:
        """Keep a response no longer."""
        if not store.remove(identity_of(request).tenant, response_id):
            raise _no_response(response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    return router


def _no_response(response_id: str) -> OutriderError:
    message = f"response_id {response_id[:100]!r} is no response that this gateway keeps"
    return OutriderError(Reason.ROUTE_NOT_FOUND, message, "response_id")
