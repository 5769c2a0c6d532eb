"""Checks where a request comes from: its Host (against DNS rebinding) and its Origin."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from fnmatch import fnmatchcase

from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.api_errors import error_response
from gateway.config import GatewaySettings
from outrider.errors import OutriderError, Reason
from outrider.process.security.exposure import is_address, is_loopback

_SHOWN_CHARACTERS = 100
_LOOPBACK = ("localhost", "*.localhost")


class CheckOrigin:
    """ASGI middleware that refuses foreign Host and Origin headers with 403.

    A website can point its own name at any address, even 127.0.0.1. Its scripts can then read
    from that address, but their requests carry the website's name as their Host. A request
    with neither Host nor Origin is let through: no browser script sends one.
    """

    def __init__(self, app: ASGIApp, settings: GatewaySettings) -> None:
        self._app = app
        self._hosts = allowed_hosts(settings)
        self._origins = re.compile(origin_pattern(settings.allowed_origins))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check(scope)
            except OutriderError as error:
                await error_response(error, scope)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        """Raise OutriderError unless this gateway may answer the request."""
        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        origins = [value.decode("latin-1") for name, value in scope["headers"] if name == b"origin"]
        if len(hosts) > 1 or len(origins) > 1:
            message = "the request has several Host or Origin headers"
            raise OutriderError(Reason.MALFORMED_REQUEST, message)
        host = "".join(hosts).lower()
        if host and not host_allowed(host, self._hosts):
            shown = repr(host[:_SHOWN_CHARACTERS])
            message = f"Host {shown} is not a name of this gateway; --allowed-hosts lists its names"
            raise OutriderError(Reason.HOST_NOT_ALLOWED, message)
        if origins and not self._origin_allowed(origins[0].lower(), host):
            message = (
                f"Origin {origins[0][:_SHOWN_CHARACTERS]!r} may not call this gateway; "
                "--allowed-origins lists websites that may"
            )
            raise OutriderError(Reason.ORIGIN_NOT_ALLOWED, message)

    def _origin_allowed(self, origin: str, host: str) -> bool:
        # Behind a proxy that terminates TLS, the page's origin has https while we see http.
        own = bool(host) and origin in (f"http://{host}", f"https://{host}")
        return own or self._origins.fullmatch(origin) is not None


def allowed_hosts(settings: GatewaySettings) -> list[str]:
    """Return the patterns, in lower case, that name this gateway.

    The pattern "" allows every name without a dot, such as a container's name in its network. This
    pattern is added unless the gateway listens only on the loopback interface.
    """
    patterns = [*_LOOPBACK, settings.http_host.lower(), socket.gethostname().lower()]
    patterns += [name.lower() for name in settings.allowed_hosts]
    if not is_loopback(settings.http_host):
        patterns.append("")
    return patterns


def host_allowed(host: str, patterns: Sequence[str]) -> bool:
    """Return whether a Host header, in lower case, names this gateway.

    An IP address is always allowed, since a website cannot have one as its name.
    """
    name = host.rpartition(":")[0] or host
    if host.startswith("["):
        name = host[1:].partition("]")[0]
    name = name.removesuffix(".")
    if is_address(name) or ("" in patterns and "." not in name):
        return True
    return any(fnmatchcase(name, pattern) for pattern in patterns if pattern)


def origin_pattern(origins: Sequence[str]) -> str:
    """Return a regular expression that matches exactly these origins.

    In an origin, * stands for letters, digits, dots and hyphens. "*" alone matches every origin.
    """
    if "*" in origins:
        return ".*"
    escaped = [re.escape(origin.lower().rstrip("/")) for origin in origins]
    patterns = [origin.replace(r"\*", r"[a-z0-9.-]+") for origin in escaped]
    return "|".join(f"(?:{pattern})" for pattern in patterns) or r"(?!)"
