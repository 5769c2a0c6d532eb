"""Writes the access line of every response, over HTTP and gRPC, with the id of its request."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from gateway.metrics import GatewayMetrics
from outrider.errors import OutriderError
from outrider.process.observability import telemetry
from outrider.process.observability.request_id import request_id

log = logging.getLogger("gateway.access")

SCOPE_KEY = "outrider.access"
"""A key in ASGI scopes. Its value is the request's Access."""
# Maps a path to the prefix of its answers' ids. On all other paths, ids begin with "req".
_PREFIXES = {
    "/v1/completions": "cmpl",
    "/v1/chat/completions": "chatcmpl",
    "/v1/messages": "msg",
    "/v1/messages/count_tokens": "msg",
    "/v1/responses": "resp",
    "/outrider.v1.GenerationService/GenerateText": "text",
}
_SHOWN_CHARACTERS = 200
# Probes and scrapers request these paths every few seconds, and a browser that opens the page
# requests many files. Successful answers to these requests are logged at the level debug.
_QUIET = (
    "/livez",
    "/readyz",
    "/health",
    "/ping",
    "/metrics",
    "/grpc.health.v1.Health/",
    "/web/",
    "/events",
)


@dataclass(slots=True)
class Access:
    """The fields of a request's access line. The code that serves the request fills them in."""

    request_id: str
    method: str
    """The HTTP method, "gRPC", or "HTTP" for a request that the connection refused."""
    path: str
    """The path without its query, still percent-encoded; over gRPC the full name of the method."""
    client: str
    """The address that the request came from, perhaps a proxy's; "" if it is not known."""
    tenant: str = ""
    model: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    """The number of tokens of the answer so far, in all its choices."""
    error: str = ""
    """The reason of the error with which the answer ended, in lower case; "" without one."""
    refusal: OutriderError | None = None
    """The error that the connection sent in place of the application's answer."""
    traceparent: str = ""
    began: float = field(default_factory=time.perf_counter)


_current: ContextVar[Access] = ContextVar("access")


def arrived(headers: Mapping[str, str], method: str, path: str, client: str) -> Access:
    """Return the access line's fields for a request with these headers (names in lower case)."""
    return Access(request_id(headers, _PREFIXES.get(path, "req")), method, path, client)


def client_of(scope: Mapping[str, Any]) -> str:
    """Return the client's address in an ASGI scope."""
    client: tuple[str, int] | None = scope.get("client")
    return client[0] if client else ""


def begin(access: Access) -> None:
    """Make `access` the access that `current` returns in the current task."""
    _current.set(access)
    telemetry.log_request_id(access.request_id)


def current() -> Access:
    """Return the access of the current task's request.

    Raises LookupError if the task serves no request.
    """
    return _current.get()


class AccessLog:
    """Counts responses, and writes a line for each."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics = metrics

    def responded(self, access: Access, route: str, status: int) -> None:
        """Count and log an HTTP response. `route` is the pattern of the path, not the path."""
        if access.refusal is not None:
            status = access.refusal.reason.kind.http
            access.error = access.refusal.reason.name.lower()
        self._metrics.http_responses.labels(route, str(status)).inc()
        _write(access, str(status), is_good=status < 400)

    def called(self, access: Access, status: str) -> None:
        """Count and log a gRPC call."""
        # Each unknown name would make a new time series.
        method = access.path if access.path in _PREFIXES else "other"
        self._metrics.grpc_responses.labels(method, status).inc()
        _write(access, status, is_good=status == "OK")


def _write(access: Access, status: str, *, is_good: bool) -> None:
    is_quiet = is_good and access.path.startswith(_QUIET)
    fields: dict[str, object] = {
        "request_id": access.request_id,
        "method": access.method,
        "path": access.path[:_SHOWN_CHARACTERS],
        "status": status,
        "client": access.client,
        "tenant": access.tenant,
        "duration_seconds": round(time.perf_counter() - access.began, 6),
    }
    if access.model:
        fields |= {
            "model": access.model,
            "prompt_tokens": access.prompt_tokens,
            "completion_tokens": access.completion_tokens,
        }
    if access.error:
        fields["error"] = access.error
    extra = {"fields": fields, "traceparent": access.traceparent}
    log.log(logging.DEBUG if is_quiet else logging.INFO, "response", extra=extra)
