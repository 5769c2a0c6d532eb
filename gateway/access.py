"""From where requests may come: the names of this gateway (against DNS rebinding) and the websites that may call it."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Sequence
from fnmatch import fnmatchcase

from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.api_errors import error_response
from gateway.config import GatewaySettings
from outrider.errors import OutriderError, Reason

_SHOWN_CHARACTERS = 100
_LOOPBACK = ("localhost", "*.localhost")


class Access:
    """Refuses a request whose Host is not this gateway's, or whose Origin is neither this gateway nor an allowed one.

    A website can give its own name any address, also 127.0.0.1, and its scripts can then read what is there. Such requests have
    the website's name as their Host. Requests without a Host or Origin do not come from a browser's script.
    """

    def __init__(self, app: ASGIApp, settings: GatewaySettings) -> None:
        self._app = app
        self._hosts = allowed_hosts(settings)
        self._origins = re.compile(origin_pattern(settings.allowed_origins))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._problem(scope) if scope["type"] == "http" else None
        if error is None:
            await self._app(scope, receive, send)
        else:
            await error_response(error)(scope, receive, send)

    def _problem(self, scope: Scope) -> OutriderError | None:
        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        origins = [value.decode("latin-1") for name, value in scope["headers"] if name == b"origin"]
        if len(hosts) > 1 or len(origins) > 1:
            return OutriderError(
                Reason.MALFORMED_REQUEST, "the request has several Host or Origin headers"
            )
        host = hosts[0].lower() if hosts else ""
        if host and not host_allowed(host, self._hosts):
            message = f"Host {host[:_SHOWN_CHARACTERS]!r} is not a name of this gateway; --allowed-hosts lists its names"
            return OutriderError(Reason.HOST_NOT_ALLOWED, message)
        if origins and not self._origin_allowed(origins[0].lower(), host):
            shown = origins[0][:_SHOWN_CHARACTERS]
            message = f"Origin {shown!r} may not call this gateway; --allowed-origins lists websites that may"
            return OutriderError(Reason.ORIGIN_NOT_ALLOWED, message)
        return None

    def _origin_allowed(self, origin: str, host: str) -> bool:
        # A proxy that ends TLS makes https of the page's origin, so the scheme says nothing.
        own = bool(host) and origin in (f"http://{host}", f"https://{host}")
        return own or self._origins.fullmatch(origin) is not None


def allowed_hosts(settings: GatewaySettings) -> list[str]:
    """Patterns of the names of this gateway; names without a dot, as in containers' networks, have the pattern ""."""
    patterns = [*_LOOPBACK, settings.http_host.lower(), socket.gethostname().lower()]
    patterns += [name.lower() for name in settings.allowed_hosts]
    return patterns if _is_loopback(settings.http_host) else [*patterns, ""]


def host_allowed(host: str, patterns: Sequence[str]) -> bool:
    """Whether a Host header, in lower case, names this gateway. An address always does: no website has one for its name."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.rpartition(":")[0] or host
    name = name.removesuffix(".")
    if _is_address(name) or ("" in patterns and "." not in name):
        return True
    return any(fnmatchcase(name, pattern) for pattern in patterns if pattern)


def origin_pattern(origins: Sequence[str]) -> str:
    """A regular expression for these origins; in each a * stands for letters, digits, dots and hyphens."""
    if "*" in origins:
        return ".*"
    each = [
        re.escape(origin.lower().rstrip("/")).replace(r"\*", r"[a-z0-9.-]+") for origin in origins
    ]
    return "|".join(f"(?:{one})" for one in each) or r"(?!)"


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host).is_loopback if _is_address(host) else host == "localhost"
