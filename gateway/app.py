"""Makes the HTTP application: routes, and middleware that checks, bounds and logs requests."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway import access_log, api_errors
from gateway.access.gate import Gate, RequireKey
from gateway.access.origins import CheckOrigin, origin_pattern
from gateway.access_log import Access, AccessLog
from gateway.config import GatewaySettings
from gateway.generation.generate import Generation
from gateway.http import endpoints, openapi, page
from gateway.http.ingress.admission import AdmissionMiddleware
from gateway.http.ingress.request_body import BodyLimit
from gateway.http.messages import routes as messages
from gateway.http.openai import routes as openai
from gateway.http.responses import routes as responses
from gateway.metrics import GatewayMetrics
from gateway.rpc import connect
from gateway.rpc.servicer import GenerationServicer
from outrider import __version__
from outrider.process.observability.request_id import HEADER


def create_app(
    settings: GatewaySettings, generation: Generation, metrics: GatewayMetrics, gate: Gate
) -> FastAPI:
    """Return the application around one Generation, for the callers that the gate admits."""
    app = FastAPI(title="Outrider", version=__version__, docs_url=None, redoc_url=None)
    app.state.ping_seconds = settings.ping_seconds
    app.state.ignores_unknown = settings.unknown_parameters == "ignore"
    app.include_router(openai.routes(generation, metrics=settings.speculation_metrics))
    app.include_router(messages.routes(generation, metrics=settings.speculation_metrics))
    app.include_router(responses.routes(generation, metrics=settings.speculation_metrics))
    app.include_router(endpoints.routes(generation, metrics))
    servicer = GenerationServicer(generation, gate)
    app.router.routes.append(connect.route(servicer))
    page.install(app, generation.router, metrics, gate)
    api_errors.install(app)
    openapi.install(app)
    app.add_middleware(BodyLimit)
    # Admission runs inside the check of keys, because the key tells whose request it is.
    app.add_middleware(
        AdmissionMiddleware, admission=generation.admission, preparing=generation.preparing
    )
    # The check of keys runs inside CORS, because a browser's preflight request has no key.
    app.add_middleware(RequireKey, gate=gate)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origin_regex=origin_pattern(settings.allowed_origins),
            allow_methods=["DELETE", "GET", "HEAD", "POST"],
            allow_headers=["*"],
            expose_headers=[
                "X-Request-Id",
                "request-id",
                "Retry-After",
                *connect.ERROR_HEADERS,
            ],
        )
    app.add_middleware(CheckOrigin, settings=settings)
    app.add_middleware(LogResponses, log=AccessLog(metrics))
    return app


class LogResponses:
    """ASGI middleware that gives each request an id, and counts and logs its response.

    The middleware also answers a request on which the gateway's own code fails, because only here
    can that answer get the id.
    """

    def __init__(self, app: ASGIApp, log: AccessLog) -> None:
        self._app = app
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # The connection may have refused the request before this task started.
        access: Access | None = scope.get(access_log.SCOPE_KEY)
        if access is None:
            path = scope.get("raw_path", b"").decode("latin-1") or scope["path"]
            access = access_log.arrived(
                Headers(scope=scope), scope["method"], path, access_log.client_of(scope)
            )
            scope[access_log.SCOPE_KEY] = access
        access_log.begin(access)
        status = 0

        async def identified(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[HEADER] = access.request_id
            await send(message)

        try:
            await self._app(scope, receive, identified)
        except Exception:  # the client gets an answer; the error goes on to the server's log
            if not status:
                failed = api_errors.error_response(api_errors.unexpected(), scope)
                await failed(scope, receive, identified)
            raise
        finally:
            # The metrics get the route's pattern, not the path: each new path would make a new time
            # series.
            route = getattr(scope.get("route"), "path", "unknown")
            self._log.responded(access, route, status or 500)
