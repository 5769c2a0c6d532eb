"""Parses request bodies as JSON, after bounding how many values they hold.

Parsing many small values would block the event loop.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from gateway.http.ingress.admission import admitted_request_in
from gateway.http.ingress.fields import ignores_unknown
from gateway.http.ingress.json_size import check_size
from outrider.errors import OutriderError, Reason

# A body of at most this size takes at most a few milliseconds to parse.
_SMALL_BYTES = 64 * 1024


class JsonRoute(APIRoute):
    """A route that calls `check_size` before it parses a body, unless the body is small."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the route's handler, wrapped so that the request's `json` checks the size."""
        handle = super().get_route_handler()

        async def bounded(request: Request) -> Response:
            """Answer the request. `request.json` raises OutriderError if the body is too large."""
            ignores_unknown.set(request.app.state.ignores_unknown)
            return await handle(_JsonRequest(request.scope, request.receive))

        return bounded


class _JsonRequest(Request):
    async def json(self) -> Any:
        body = await self.body()
        if (admitted := admitted_request_in(self.scope)) is not None:
            await admitted.acquire()
        if len(body) <= _SMALL_BYTES:
            return json.loads(_text(body))
        # Let other requests run between the steps.
        await asyncio.sleep(0)
        check_size(body)
        await asyncio.sleep(0)
        parsed = json.loads(_text(body))
        await asyncio.sleep(0)
        return parsed


def _text(body: bytes) -> str:
    """Return the body as text. The body must be UTF-8; `json` would take UTF-16 and UTF-32 too."""
    try:
        return body.decode("utf-8-sig")
    except UnicodeDecodeError as cause:
        message = f"the body must be JSON in UTF-8; its byte {cause.start} is not UTF-8"
        raise OutriderError(Reason.MALFORMED_REQUEST, message) from cause
