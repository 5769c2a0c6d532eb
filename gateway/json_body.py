"""Request bodies as JSON, bounded in what they hold before they are parsed: parsing many small values holds up the event loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from outrider.errors import OutriderError, Reason

MAX_STRINGS = 32_768
"""Most strings of a body, keys included."""
MAX_VALUES = 262_144
"""Most values of a body, such as the token ids of its prompts."""
# A body of fewer bytes is parsed within some milliseconds, whatever it holds.
_SMALL_BYTES = 64 * 1024


class JsonRoute(APIRoute):
    """A route whose body is checked by `check_size` before it is parsed."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def bounded(request: Request) -> Response:
            return await handle(_JsonRequest(request.scope, request.receive))

        return bounded


class _JsonRequest(Request):
    async def json(self) -> Any:
        body = await self.body()
        if len(body) <= _SMALL_BYTES:
            return json.loads(body)
        # Other requests get a turn between each two steps.
        await asyncio.sleep(0)
        check_size(body)
        await asyncio.sleep(0)
        parsed = json.loads(body)
        await asyncio.sleep(0)
        return parsed


def check_size(body: bytes, max_values: int = MAX_VALUES) -> None:
    """Raises OutriderError(REQUEST_TOO_LARGE) for more than MAX_STRINGS or `max_values`, and MALFORMED_REQUEST unless it is UTF-8.

    Takes some 10 ms for 4 MiB, since only methods of `bytes` look at all of it. Exact for JSON; what is no JSON is refused later.
    """
    if not json.detect_encoding(body).startswith("utf-8"):
        raise OutriderError(Reason.MALFORMED_REQUEST, "the body must be JSON in UTF-8")
    if b"\\" in body:
        # Afterwards every quotation mark begins or ends a string.
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if body.count(b'"') > 2 * MAX_STRINGS:
        raise OutriderError(
            Reason.REQUEST_TOO_LARGE, f"the body holds more than {MAX_STRINGS} strings"
        )
    around_strings = b"".join(body.split(b'"')[::2])
    # Each value but the first is after one of these.
    value_count = 1
    for mark in (b",", b"[", b"{"):
        value_count += around_strings.count(mark)
        if value_count > max_values:
            raise OutriderError(
                Reason.REQUEST_TOO_LARGE, f"the body holds more than {max_values} values"
            )
