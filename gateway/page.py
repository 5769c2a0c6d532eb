"""The page at `/`, and the events that keep it up to date. Static files and sums; knows no model and no request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.responses import FileResponse, Response, StreamingResponse
from fastapi.staticfiles import StaticFiles

from gateway.metrics import Metrics
from gateway.routing import Router
from gateway.streaming import event
from gateway.system import readiness
from outrider import __version__

_WEB = Path(__file__).with_name("web")
_EVERY_S = 0.5
# Scripts, styles and data from here alone; uPlot sets styles on the elements that it makes.
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class _Files(StaticFiles):
    """The page's files, revalidated each time, so that an upgraded gateway never runs with an old script."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers.update(_HEADERS)
        return response


def install(app: FastAPI, router: Router, metrics: Metrics) -> None:
    """Add the page and its events."""
    routes = APIRouter()

    @routes.get("/", include_in_schema=False)
    async def page() -> Response:
        return FileResponse(_WEB / "index.html", headers=_HEADERS)

    @routes.get("/events", include_in_schema=False)
    async def events() -> Response:
        """Processes and sums, twice a second, until the reader leaves or the gateway is about to."""
        unbuffered = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        return StreamingResponse(
            _events(router, metrics), media_type="text/event-stream", headers=unbuffered
        )

    app.include_router(routes)
    app.mount("/web", _Files(directory=_WEB))


async def _events(router: Router, metrics: Metrics) -> AsyncGenerator[bytes, None]:
    while True:
        yield event(_state(router, metrics))
        if router.draining:
            return
        await asyncio.sleep(_EVERY_S)


def _state(router: Router, metrics: Metrics) -> dict[str, Any]:
    return {
        "version": __version__,
        "seconds": time.monotonic(),
        "models": list(router.models),
        "readiness": readiness(router),
        "activity": metrics.activity.snapshot(),
    }
