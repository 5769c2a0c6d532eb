"""The page at `/`: its static files, and the events that update it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import FileResponse, Response, StreamingResponse
from fastapi.staticfiles import StaticFiles

from gateway.access.gate import Gate, Identity
from gateway.http.endpoints import readiness
from gateway.http.streaming import event
from gateway.metrics import Metrics
from gateway.upstream.routing import Router
from outrider import __version__
from outrider.errors import OutriderError

_WEB = Path(__file__).parents[1] / "web"
_EVERY_S = 0.5
# The page may load scripts, styles and data from this gateway alone. uPlot needs inline styles.
_POLICY = [
    "default-src 'self'",
    "style-src 'self' 'unsafe-inline'",
    "frame-ancestors 'none'",
    "base-uri 'none'",
]
_HEADERS = {
    "Content-Security-Policy": "; ".join(_POLICY),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class _Files(StaticFiles):
    """The page's files. Browsers revalidate them, so a new gateway never runs an old script."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers.update(_HEADERS)
        return response


def install(app: FastAPI, router: Router, metrics: Metrics, gate: Gate) -> None:
    """Add the page and its events."""
    routes = APIRouter()

    @routes.get("/", include_in_schema=False)
    async def page() -> Response:
        """The page, with headers that let it load from this gateway alone."""
        return FileResponse(_WEB / "index.html", headers=_HEADERS)

    @routes.get("/events", include_in_schema=False)
    async def events(request: Request) -> Response:
        """Stream the state twice a second, until the client leaves or the gateway drains.

        Operators see the sums over all tenants and the processes, other callers their own sums. The
        stream also ends once the caller's key is revoked or has expired.
        """
        unbuffered = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        states = _events(router, metrics, lambda: gate.identify_http(request.scope))
        return StreamingResponse(states, media_type="text/event-stream", headers=unbuffered)

    app.include_router(routes)
    app.mount("/web", _Files(directory=_WEB))


async def _events(
    router: Router, metrics: Metrics, identify: Callable[[], Identity]
) -> AsyncGenerator[bytes, None]:
    while True:
        try:
            identity = identify()
        except OutriderError:
            return
        yield event(_state(router, metrics, identity))
        if router.draining:
            return
        await asyncio.sleep(_EVERY_S)


def _state(router: Router, metrics: Metrics, identity: Identity) -> dict[str, Any]:
    activity = metrics.activity
    if not identity.is_operator:
        activity = metrics.activity_of(identity.tenant)
    return {
        "version": __version__,
        "seconds": time.monotonic(),
        "models": list(router.models),
        "readiness": readiness(router, identity),
        "activity": activity.snapshot(),
    }
