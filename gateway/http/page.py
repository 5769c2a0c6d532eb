"""The page at `/`: its static files, and the events that update it."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import FileResponse, Response
from fastapi.staticfiles import StaticFiles

from gateway.access.gate import Gate, Identity
from gateway.http.endpoints import readiness
from gateway.http.streaming import EventStream, event
from gateway.metrics import GatewayMetrics
from gateway.upstream.routing import Router
from outrider import __version__
from outrider.errors import OutriderError, Reason

_WEB = Path(__file__).parents[1] / "web"
_EVERY_S = 0.5
# Streams share an event that is no older than this, so that many streams cost little more than one.
_SHARED_S = 0.25
MOST_FEEDS = 16
"""The maximum number of event streams of a tenant. Each open page has one stream."""
# A refused caller is told to try again after this time.
_RETRY_S = 2.0
# The page may load scripts, styles and data only from this gateway. uPlot needs inline styles.
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


def install(app: FastAPI, router: Router, metrics: GatewayMetrics, gate: Gate) -> None:
    """Add the page and its events."""
    routes = APIRouter()

    @routes.get("/", include_in_schema=False)
    async def page() -> Response:
        """The page, with headers that let it load other files only from this gateway."""
        return FileResponse(_WEB / "index.html", headers=_HEADERS)

    feeds = _Feeds(router, metrics)

    @routes.get("/events", include_in_schema=False)
    async def events(request: Request) -> Response:
        """Stream the state twice a second, until the client leaves or the gateway drains.

        Operators see the processes, and sums over all tenants. Other callers see the sums over
        their tenant's requests. The stream also ends once the caller's key is revoked or has
        expired. A tenant has at most MOST_FEEDS such streams.
        """
        identity = gate.identify_http(request.scope)
        states = feeds.events(lambda: gate.identify_http(request.scope))
        return EventStream(states, feeds.open(identity))

    app.include_router(routes)
    app.mount("/web", _Files(directory=_WEB))


class _Feeds:
    """The open streams of events. Streams with the same rights share each encoded state."""

    def __init__(self, router: Router, metrics: GatewayMetrics) -> None:
        self._router = router
        self._metrics = metrics
        self._open: Counter[str] = Counter()
        # Maps a tenant, or None for operators, to the last event and the time of its creation
        # (seconds).
        self._made: dict[str | None, tuple[float, bytes]] = {}

    def open(self, identity: Identity) -> AsyncExitStack:
        """Count a stream until the returned stack is closed.

        Raises OutriderError(RATE_LIMIT_EXCEEDED) if the tenant has MOST_FEEDS streams. Without keys
        all callers count as one tenant, since a caller could claim any number of tenants.
        """
        account = "" if identity.key is None else identity.tenant
        if self._open[account] >= MOST_FEEDS:
            message = f"{MOST_FEEDS} streams of /events are open, the maximum for a tenant"
            raise OutriderError(Reason.RATE_LIMIT_EXCEEDED, message, retry_after_s=_RETRY_S)
        self._open[account] += 1
        stack = AsyncExitStack()
        stack.callback(self._close, account)
        return stack

    def _close(self, account: str) -> None:
        self._open[account] -= 1
        if not self._open[account]:
            del self._open[account]

    async def events(self, identify: Callable[[], Identity]) -> AsyncGenerator[bytes, None]:
        """Yield states. The first state is new; later states may be shared with another stream."""
        most_age_s = 0.0
        while True:
            try:
                identity = identify()
            except OutriderError:
                return
            yield self._event(identity, most_age_s)
            if self._router.draining:
                return
            most_age_s = _SHARED_S
            await asyncio.sleep(_EVERY_S)

    def _event(self, identity: Identity, most_age_s: float) -> bytes:
        """Return the encoded state for the caller.

        The state may have been encoded up to `most_age_s` ago, for another caller with the same
        rights.
        """
        rights = None if identity.is_operator else identity.tenant
        made_at, made = self._made.get(rights, (-math.inf, b""))
        now = time.monotonic()
        if now - made_at >= most_age_s:
            made = event(_state(self._router, self._metrics, identity))
            # Callers without keys may claim any number of tenants, so nothing is kept for long.
            made_since = now - _SHARED_S
            self._made = {key: kept for key, kept in self._made.items() if kept[0] > made_since}
            self._made[rights] = now, made
        return made


def _state(router: Router, metrics: GatewayMetrics, identity: Identity) -> dict[str, Any]:
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
