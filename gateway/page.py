"""The page at `/`: its static files, and the events that update it."""

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


def install(app: FastAPI, router: Router, metrics: Metrics) -> None:
    """Add the page and its events."""
    routes = APIRouter()

    @routes.get("/", include_in_schema=False)
    async def page() -> Response:
        """The page, with headers that let it load from this gateway alone."""
        return FileResponse(_WEB / "index.html", headers=_HEADERS)

    @routes.get("/events", include_in_schema=False)
    async def events() -> Response:
        """Stream the state twice a second, until the client leaves or the gateway drains."""
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
