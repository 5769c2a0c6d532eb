"""Admits HTTP requests before their bodies are read. Tenants then take turns with their bodies."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import NamedTuple

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.access.gate import identity_in
from gateway.api_errors import error_response
from gateway.generation.admission import Admission, AdmissionSlots, ClientTimeout
from gateway.generation.tenant_semaphore import TenantSemaphore
from outrider.errors import OutriderError

_GENERATING = frozenset(
    {"/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"}
)
PATHS = _GENERATING | {"/v1/messages/count_tokens", "/tokenize", "/detokenize"}
"""Paths of requests whose bodies cost memory while they arrive, and work after that."""

_SCOPE_KEY = "outrider.admitted"
_ENDLESS = ClientTimeout(total_s=math.inf)
# A body may name a timeout even where its headers choose none. So the gateway reads the bodies of
# this many such requests of a tenant at a time before it checks whether they would be late. It
# checks further requests before it reads their bodies, since it must not read all bodies of a burst
# that is late.
_READ_AT_ONCE = 8
# OpenAI's clients send their timeout in these headers: the Python client in the first, the clients
# in other languages in the second.
_CLIENT_HEADERS = ("x-stainless-read-timeout", "x-stainless-timeout")


class AdmittedRequest:
    """The slots of a request, from its headers until it is sent to a verifier.

    Use it as a context manager.
    """

    def __init__(
        self, preparing: TenantSemaphore, tenant: str, admitted: Sequence[AdmissionSlots]
    ) -> None:
        self._preparing = preparing
        self._tenant = tenant
        self._admitted = admitted
        self._has_slot = False

    async def acquire(self) -> None:
        """Wait for a slot of `preparing`, to parse the body, which has arrived."""
        await self._preparing.acquire(self._tenant)
        self._has_slot = True

    def release_slots(self) -> None:
        """Stop counting the request as one sequence, because its body's sequences count instead."""
        for admitted in self._admitted:
            admitted.close()

    def end(self) -> None:
        """Release the slots that the request still holds: for one sequence, and for parsing."""
        self.release_slots()
        if self._has_slot:
            self._has_slot = False
            self._preparing.release(self._tenant)

    def __enter__(self) -> AdmittedRequest:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        self.end()


class _Route(NamedTuple):
    """Stands for the route of a request refused here: metrics count responses by route."""

    path: str


class AdmissionMiddleware:
    """ASGI middleware that refuses requests for which the verifiers lack room or time.

    It does not read the bodies of these requests. A request counts as one sequence until its body
    says how many choices it wants. Where the gateway serves several models, only the body names the
    model, so no request counts before its body is read.
    """

    def __init__(self, app: ASGIApp, admission: Admission, preparing: TenantSemaphore) -> None:
        self._app = app
        self._admission = admission
        self._preparing = preparing
        # Maps a tenant to its number of requests that were admitted without a check for lateness.
        self._unchecked: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the request, or pass it on with its AdmittedRequest."""
        if scope["type"] != "http" or scope["path"] not in PATHS or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        self._preparing.comes_in()
        tenant = identity_in(scope).tenant
        try:
            admitted = self._admit(scope, tenant)
        except OutriderError as error:
            scope["route"] = _Route(scope["path"])
            await error_response(error, scope)(scope, receive, send)
            return
        with AdmittedRequest(self._preparing, tenant, admitted) as request:
            scope[_SCOPE_KEY] = request

            async def answer(message: Message) -> None:
                # Release the slots: a client that does not read its answer must not delay others.
                request.end()
                await send(message)

            await self._app(scope, receive, answer)

    def _admit(self, scope: Scope, tenant: str) -> list[AdmissionSlots]:
        """Count the request until its body is read. Raises OutriderError(OVERLOADED)."""
        model = self._admission.only_model()
        if model is None:
            return []
        timeout = ClientTimeout(first_s=client_seconds(Headers(scope=scope)))
        if scope["path"] not in _GENERATING:
            # Requests on the other paths need no verifier, so they cannot be late.
            return [self._admission.admit(model, tenant, 1, _ENDLESS)]
        if timeout.is_chosen or self._unchecked[tenant] >= _READ_AT_ONCE:
            return [self._admission.admit(model, tenant, 1, timeout)]
        admitted = self._admission.admit(model, tenant, 1, _ENDLESS)
        return [admitted, AdmissionSlots(self._unchecked, tenant, 1, math.inf)]


def client_seconds(headers: Mapping[str, str]) -> float | None:
    """Return the client's timeout in seconds, as these headers state it; None without one."""
    named = [_seconds(headers[name]) for name in _CLIENT_HEADERS if name in headers]
    return min([seconds for seconds in named if seconds is not None], default=None)


def _seconds(text: str) -> float | None:
    """Return a header's positive number; None for other values, which clients may also send."""
    try:
        seconds = float(text)
    except ValueError:
        return None
    return seconds if 0.0 < seconds < math.inf else None


def admitted_request(request: HTTPConnection) -> AdmittedRequest:
    """Return the admitted request behind an HTTP request, whose path must be in `PATHS`."""
    found: AdmittedRequest = request.scope[_SCOPE_KEY]
    return found


def admitted_request_in(scope: Scope) -> AdmittedRequest | None:
    """Return the admitted request in an ASGI scope; only POST requests to `PATHS` have one."""
    found: AdmittedRequest | None = scope.get(_SCOPE_KEY)
    return found
