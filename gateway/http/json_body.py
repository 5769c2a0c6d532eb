"""Parse request bodies as JSON, after bounding how many values they hold.

Parsing many small values would block the event loop.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from gateway.http.entrance import arrival_in
from gateway.http.fields import ignores_unknown
from outrider.errors import OutriderError, Reason

MAX_STRINGS = 32_768
"""Most strings of a body, keys included."""
MAX_VALUES = 262_144
"""Most values of a body, such as the token ids of its prompts."""
# A body of at most this size takes a few milliseconds to parse, whatever it holds.
_SMALL_BYTES = 64 * 1024


class JsonRoute(APIRoute):
    """A route whose body is checked by `check_size` before it is parsed."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler of the route, called with a request whose `json` checks the size."""
        handle = super().get_route_handler()

        async def bounded(request: Request) -> Response:
            """Answer the request. Its `json` raises OutriderError if the body is too large."""
            ignores_unknown.set(request.app.state.ignores_unknown)
            return await handle(_JsonRequest(request.scope, request.receive))

        return bounded


class _JsonRequest(Request):
    async def json(self) -> Any:
        body = await self.body()
        if (arrival := arrival_in(self.scope)) is not None:
            await arrival.turn()
        if len(body) <= _SMALL_BYTES:
            return json.loads(body)
        # Let other requests run between the steps.
        await asyncio.sleep(0)
        check_size(body)
        await asyncio.sleep(0)
        parsed = json.loads(body)
        await asyncio.sleep(0)
        return parsed


def check_size(body: bytes, max_values: int = MAX_VALUES) -> None:
    """Bound the strings and values of a JSON body before it is parsed.

    Raises OutriderError(REQUEST_TOO_LARGE) for more than MAX_STRINGS strings or `max_values`
    values, and OutriderError(MALFORMED_REQUEST) unless the body is UTF-8. The counts are exact
    for valid JSON; the parser refuses the rest. Takes about 10 ms for 4 MiB, since only methods
    of `bytes` look at every byte.
    """
    if not json.detect_encoding(body).startswith("utf-8"):
        raise OutriderError(Reason.MALFORMED_REQUEST, "the body must be JSON in UTF-8")
    if b"\\" in body:
        # Without escapes, every quotation mark begins or ends a string.
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if body.count(b'"') > 2 * MAX_STRINGS:
        message = f"the body holds more than {MAX_STRINGS} strings"
        raise OutriderError(Reason.REQUEST_TOO_LARGE, message)
    outside_strings = b"".join(body.split(b'"')[::2])
    # Each value but the first follows one of these marks.
    value_count = 1
    for mark in (b",", b"[", b"{"):
        value_count += outside_strings.count(mark)
        if value_count > max_values:
            message = f"the body holds more than {max_values} values"
            raise OutriderError(Reason.REQUEST_TOO_LARGE, message)
