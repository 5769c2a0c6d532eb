"""Identifies callers and tenants by API key.

If the gateway has keys, it refuses callers without a valid key. Caches and n-gram pools are private
to a tenant.
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from gateway import access_log
from gateway.access.key_file import KeyEntry
from gateway.access.keys import KeyRing
from gateway.api_errors import error_response
from gateway.config import GatewaySettings
from outrider.errors import OutriderError, Reason
from outrider.process.security.roles import Peer, Role

OPEN_PATHS = frozenset({"/livez", "/readyz", "/health", "/ping"})
"""Paths that need no key."""
PEER_KEY = "outrider.peer"
"""A key in ASGI scopes. Its value is the connection's Peer, or None without TLS."""
_PAGE = "/"
_TENANT_DIGITS = 32
_SCOPE_KEY = "outrider.identity"


@dataclass(frozen=True, slots=True)
class Identity:
    """The caller's identity.

    If the gateway has no keys, `key` is None, and `tenant` comes from the headers (`tenant_of`).
    """

    tenant: str
    is_operator: bool
    key: KeyEntry | None = None


_STRANGER = Identity("", is_operator=False)


class Gate:
    """Identifies callers.

    Without keys everybody is an operator. But if clients need certificates, only a client whose
    certificate has the role operator is one. Raises OutriderError(INVALID_VALUE) for unusable keys.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        self.keys: KeyRing | None = None
        if settings.keys_file is not None or settings.keys:
            self.keys = KeyRing(settings.keys_file, settings.keys)
        self._asks_for_certificates = settings.public_tls_ca is not None

    def identify(self, headers: Mapping[str, str], peer: Peer | None = None) -> Identity:
        """Return the caller with these headers (names in lower case) and this certificate.

        Raises OutriderError(INVALID_API_KEY) if there are keys and the caller has no valid key.
        """
        if self.keys is None:
            is_operator = peer is not None and peer.role is Role.OPERATOR
            return Identity(tenant_of(headers), is_operator or not self._asks_for_certificates)
        key = key_in(headers.get("authorization", "")) or _plain_key(headers)
        if not key:
            named = "`Authorization: Bearer KEY` or `x-api-key: KEY`"
            message = f"an API key is needed, in the header {named}"
            raise OutriderError(Reason.INVALID_API_KEY, message)
        entry = self.keys.find(key)
        if entry is None:
            raise OutriderError(Reason.INVALID_API_KEY, "the API key is not known here")
        if entry.expires is not None and entry.expires.timestamp() <= time.time():
            raise OutriderError(Reason.INVALID_API_KEY, "the API key has expired")
        return Identity(entry.tenant, entry.role == "operator", entry)

    def identify_http(self, scope: Scope) -> Identity:
        """Return the caller of an HTTP request. Raises OutriderError as `identify` does."""
        return self.identify(HTTPConnection(scope).headers, scope.get(PEER_KEY))


def tenant_of(headers: Mapping[str, str]) -> str:
    """Return the tenant of a request.

    The key comes from `authorization: Bearer KEY`, or if there is none, from `x-api-key: KEY`.
    Without a key the tenant is empty (the default). The name is `key-` and the first 32 hex digits
    of the key's SHA-256, so logs, traces and Redis do not reveal keys. `headers` have lower-case
    names.
    """
    key = _bearer(headers.get("authorization", "")) or _plain_key(headers)
    if not key:
        return ""
    return f"key-{hashlib.sha256(key.encode()).hexdigest()[:_TENANT_DIGITS]}"


def _plain_key(headers: Mapping[str, str]) -> str:
    """Return the key in `x-api-key`, the header of Anthropic's clients; "" if there is none."""
    return headers.get("x-api-key", "").strip()


def _bearer(authorization: str) -> str:
    """Return the key in `Bearer KEY`; "" for any other value."""
    scheme, _, key = authorization.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def key_in(authorization: str) -> str:
    """Return the key in the value of an Authorization header; "" if there is none.

    Browsers cannot send `Bearer KEY` for a page, but ask for a password and send it as Basic. The
    password is the key, with any user name.
    """
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() != "basic":
        return _bearer(authorization)
    try:
        return base64.b64decode(value, validate=True).decode().partition(":")[2]
    # The value is not base64 or not UTF-8, or it has characters outside of ASCII.
    except ValueError:
        return ""


class RequireKey:
    """ASGI middleware that answers 401 to callers without a valid key, except on `OPEN_PATHS`.

    If the gateway has keys, every other path needs one. So a new route is closed unless
    `OPEN_PATHS` lists it.
    """

    def __init__(self, app: ASGIApp, gate: Gate) -> None:
        self._app = app
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            # Close every WebSocket: no route takes one, and nothing would check its key.
            await WebSocketClose()(scope, receive, send)
            return
        try:
            scope[_SCOPE_KEY] = identity = self._gate.identify_http(scope)
            access_log.current().tenant = identity.tenant
        except OutriderError as error:
            if scope["path"] not in OPEN_PATHS:
                response = error_response(error, scope)
                scheme = "Basic" if scope["path"] == _PAGE else "Bearer"
                response.headers["WWW-Authenticate"] = f'{scheme} realm="Outrider"'
                await response(scope, receive, send)
                return
            scope[_SCOPE_KEY] = _STRANGER
        await self._app(scope, receive, send)


def identity_of(request: HTTPConnection) -> Identity:
    """Return the identity of the request's sender."""
    return identity_in(request.scope)


def identity_in(scope: Scope) -> Identity:
    """Return the identity of the sender of the request with this scope."""
    identity: Identity = scope[_SCOPE_KEY]
    return identity


def operators_only(request: HTTPConnection) -> None:
    """Raise OutriderError(INSUFFICIENT_PERMISSIONS) unless the caller is an operator.

    Routes have this function as a dependency.
    """
    if not identity_of(request).is_operator:
        message = "this shows all tenants, so it needs a key with the role operator"
        raise OutriderError(Reason.INSUFFICIENT_PERMISSIONS, message)
