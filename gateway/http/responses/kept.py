"""The endpoints for the Responses API's kept answers.

They read, replay and delete an answer, list the items before it, and refuse to cancel it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack
from functools import partial
from hashlib import sha256
from itertools import islice
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response

from gateway.access.gate import identity_of
from gateway.http.openapi import STREAMED, json_responses
from gateway.http.responses.output import Json, replayed
from gateway.http.responses.store import ResponseStore
from gateway.http.streaming import EventStream, event
from outrider.errors import OutriderError, Reason, invalid

MAX_LISTED_ITEMS = 100
MAX_REPLAYED_BYTES = 1024 * 1024
"""The maximum number of bytes of a response whose events can be sent again.

The events take several times as many bytes: three of them hold the response's parameters, and each
text is in its deltas and in four further events.
"""
# Encoding this many events takes a few milliseconds.
_EVENTS_AT_ONCE = 64
# Maps the type of an item to the prefix of its id.
_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
}


def add_kept_routes(router: APIRouter, store: ResponseStore) -> None:
    """Add the endpoints to the router. Each tenant sees only its own answers."""
    path = "/v1/responses/{response_id}"

    @router.get(path, responses=json_responses(400, 401, 404, also=STREAMED))
    async def kept_response(
        response_id: str,
        request: Request,
        stream: Annotated[bool, Query(description="Stream the events again.")] = False,
        starting_after: Annotated[int | None, Query(ge=0)] = None,
    ) -> Response:
        """A response that is still kept, whole or as its stream's events."""
        tenant = identity_of(request).tenant
        found = store.response(tenant, response_id)
        if found is None:
            raise _no_response(response_id)
        if not stream:
            return Response(found, media_type="application/json")
        return _replay(found, store.deltas(tenant, response_id), starting_after)

    @router.get(f"{path}/input_items", responses=json_responses(400, 401, 404))
    async def input_items(
        response_id: str,
        request: Request,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=MAX_LISTED_ITEMS)] = 20,
        order: Literal["asc", "desc"] = "desc",
    ) -> Response:
        """The items of the conversation before a kept answer."""
        before = store.before(identity_of(request).tenant, response_id)
        if before is None:
            raise _no_response(response_id)
        items = _Items(before, response_id)
        return JSONResponse(await items.page(after, limit, is_ascending=order == "asc"))

    head = partial(router.add_api_route, methods=["HEAD"], include_in_schema=False)
    head(path, kept_response)
    head(f"{path}/input_items", input_items)

    @router.post(f"{path}/cancel", responses=json_responses(400, 401, 404))
    async def cancel_response(response_id: str, request: Request) -> Response:
        """Refuse: only background responses can be cancelled, and there are none here."""
        if store.response(identity_of(request).tenant, response_id) is None:
            raise _no_response(response_id)
        problem = "is of a synchronous response, and only background responses can be cancelled"
        raise invalid("response_id", problem)

    @router.delete(path, responses=json_responses(401, 404))
    async def delete_response(response_id: str, request: Request) -> Response:
        """Delete a kept response."""
        if not store.remove(identity_of(request).tenant, response_id):
            raise _no_response(response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})


def _no_response(response_id: str) -> OutriderError:
    message = f"response_id {response_id[:100]!r} is no response that this gateway keeps"
    return OutriderError(Reason.ROUTE_NOT_FOUND, message, "response_id")


def _replay(found: bytes, deltas: Sequence[Sequence[int]], after: int | None) -> Response:
    """Return a response's events as a stream.

    Raises OutriderError(INVALID_VALUE) for a large response.
    """
    if len(found) > MAX_REPLAYED_BYTES:
        problem = f"is for responses of at most {MAX_REPLAYED_BYTES} bytes, not {len(found)}"
        raise invalid("stream", problem)
    begin = 0 if after is None else after + 1
    return EventStream(_events(json.loads(found), deltas, begin), AsyncExitStack())


async def _events(
    response: Json, deltas: Sequence[Sequence[int]], begin: int
) -> AsyncGenerator[bytes, None]:
    """Yield the response's events from number `begin` on. Other tasks run in between."""
    for number, made in islice(enumerate(replayed(response, deltas)), begin, None):
        if number % _EVENTS_AT_ONCE == 0:
            await asyncio.sleep(0)
        yield event({**made, "sequence_number": number}, made["type"])


class _Items:
    """The items before an answer, as OpenAI lists them. Other tasks run between two items."""

    def __init__(self, kept: Sequence[bytes], response_id: str) -> None:
        self._kept = kept
        self._response_id = response_id

    async def page(self, after: str | None, limit: int, *, is_ascending: bool) -> Json:
        """Return the page after the item of id `after`. Raises OutriderError(INVALID_VALUE)."""
        places = range(len(self._kept))
        if not is_ascending:
            places = places[::-1]
        begin = 0 if after is None else places.index(await self._place(after)) + 1
        data = [await self._read(at) for at in places[begin : begin + limit]]
        return {
            "object": "list",
            "data": data,
            "first_id": data[0]["id"] if data else None,
            "last_id": data[-1]["id"] if data else None,
            "has_more": begin + limit < len(places),
        }

    async def _place(self, item_id: str) -> int:
        for at in range(len(self._kept)):
            if (await self._read(at))["id"] == item_id:
                return at
        raise invalid("after", f"is the id of no input item of the response: {item_id[:100]!r}")

    async def _read(self, at: int) -> Json:
        """Return an item with an id, a status, and its texts as parts.

        An item that came without an id gets an id that depends only on the response and the item's
        place, so the id is the same each time.
        """
        await asyncio.sleep(0)
        item: Json = json.loads(self._kept[at])
        kind = item["type"]
        place = sha256(f"{self._response_id} {at}".encode()).hexdigest()[:48]
        listed = {"id": f"{_PREFIXES[kind]}_{place}", "status": "completed", **item}
        part: Json = {"type": "input_text"}
        if kind == "reasoning":
            listed.setdefault("summary", [])
            part = {"type": "reasoning_text"}
        elif item.get("role") == "assistant":
            part = {"type": "output_text", "annotations": [], "logprobs": []}
        text = item.get("content")
        return listed | {"content": [{**part, "text": text}]} if isinstance(text, str) else listed
