"""Where requests over HTTP come in: refuse what is too much unread, and take the rest in turns."""

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
from gateway.generation.admission import Admission, ClientTimeout, Permit
from gateway.generation.turns import Turns
from outrider.errors import OutriderError

_GENERATING = frozenset(
    {"/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"}
)
PATHS = _GENERATING | {"/v1/messages/count_tokens", "/tokenize", "/detokenize"}
"""Paths of requests whose bodies cost memory while they arrive, and work after that."""

_SCOPE_KEY = "outrider.arrival"
_ENDLESS = ClientTimeout(total_s=math.inf)
# A body may name a longer timeout than its headers. Of each tenant, so many requests at a time are
# not refused as late before their bodies are read. A burst that is late must not be read at all.
_READ_AT_ONCE = 8
# OpenAI's clients say here when they give up: in Python, and in all other languages.
_CLIENT_HEADERS = ("x-stainless-read-timeout", "x-stainless-timeout")


class Arrival:
    """A request from its headers until it is sent to a verifier. Use it as a context manager."""

    def __init__(self, turns: Turns, tenant: str, permits: Sequence[Permit]) -> None:
        self._turns = turns
        self._tenant = tenant
        self._permits = permits
        self._has_turn = False

    async def turn(self) -> None:
        """Wait for the turn to parse the body, which has arrived."""
        await self._turns.enter(self._tenant)
        self._has_turn = True

    def give_place_back(self) -> None:
        """Count no longer as one sequence: the sequences that the body asks for count instead."""
        for permit in self._permits:
            permit.close()

    def end(self) -> None:
        """Give back its place, if it still has one, and give its turn to the next request."""
        self.give_place_back()
        if self._has_turn:
            self._has_turn = False
            self._turns.leave(self._tenant)

    def __enter__(self) -> Arrival:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        self.end()


class _Route(NamedTuple):
    """A route as the router would find it, for metrics that count responses by route."""

    path: str


class Entrance:
    """ASGI middleware that refuses a request for text, before reading it, when the batch is full.

    A request counts as one sequence until its body says how many choices it wants. Where the
    gateway serves several models, only the body names the model, so nothing counts before it.
    """

    def __init__(self, app: ASGIApp, admission: Admission, turns: Turns) -> None:
        self._app = app
        self._admission = admission
        self._turns = turns
        # Requests by tenant that were let in whether or not they are late.
        self._unchecked: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the request, or pass it on with its Arrival."""
        if scope["type"] != "http" or scope["path"] not in PATHS or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        self._turns.comes_in()
        tenant = identity_in(scope).tenant
        try:
            permits = self._enter(scope, tenant)
        except OutriderError as error:
            scope["route"] = _Route(scope["path"])
            await error_response(error, scope)(scope, receive, send)
            return
        with Arrival(self._turns, tenant, permits) as arrival:
            scope[_SCOPE_KEY] = arrival

            async def answer(message: Message) -> None:
                # A client that does not read its answer holds up nobody.
                arrival.end()
                await send(message)

            await self._app(scope, receive, answer)

    def _enter(self, scope: Scope, tenant: str) -> list[Permit]:
        """Count the request until its body is read. Raises OutriderError(OVERLOADED)."""
        model = self._admission.only_model()
        if model is None:
            return []
        timeout = ClientTimeout(first_s=client_seconds(Headers(scope=scope)))
        if scope["path"] not in _GENERATING:
            # It waits for no verifier.
            return [self._admission.enter(model, tenant, 1, _ENDLESS)]
        if timeout.is_chosen or self._unchecked[tenant] >= _READ_AT_ONCE:
            return [self._admission.enter(model, tenant, 1, timeout)]
        permit = self._admission.enter(model, tenant, 1, _ENDLESS)
        return [permit, Permit(self._unchecked, tenant, 1, math.inf)]


def client_seconds(headers: Mapping[str, str]) -> float | None:
    """When the client gives up by these headers; None if they do not say it."""
    named = [_seconds(headers[name]) for name in _CLIENT_HEADERS if name in headers]
    return min([seconds for seconds in named if seconds is not None], default=None)


def _seconds(text: str) -> float | None:
    """A header's positive number; None for anything else, since it is the client's own note."""
    try:
        seconds = float(text)
    except ValueError:
        return None
    return seconds if 0.0 < seconds < math.inf else None


def arrival_of(request: HTTPConnection) -> Arrival:
    """The request's arrival. Its path must be one of `PATHS`."""
    arrival: Arrival = request.scope[_SCOPE_KEY]
    return arrival


def arrival_in(scope: Scope) -> Arrival | None:
    """The arrival of the request with this scope; None on other paths."""
    arrival: Arrival | None = scope.get(_SCOPE_KEY)
    return arrival
