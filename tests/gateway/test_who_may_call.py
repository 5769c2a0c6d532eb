"""Who may call each route and RPC of the gateway. A new route or RPC must be added here."""

from __future__ import annotations

from collections.abc import AsyncIterator
from enum import Enum
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio
from fastapi.routing import APIRoute
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from starlette.routing import Mount, Route

from gateway.access.gate import OPEN_PATHS
from gateway.app import create_app
from gateway.metrics import GatewayMetrics
from gateway.rpc.servicer import SERVICE
from gateway.server import Gateway
from gateway.text.prompts import Prompts
from outrider.process.network import rpc
from outrider.v1 import generation_pb2
from tests.gateway.gateway_rig import Rig
from tests.gateway.keyed_rig import ALICE, OPERATOR, auth, entry, keyed_rig
from tests.gateway.test_access import settings, unused

pytestmark = pytest.mark.asyncio(loop_scope="session")


class May(Enum):
    """Who may call: everybody, everybody with a key, or operators."""

    ANYONE = 0
    TENANT = 1
    OPERATOR = 2


ROUTES = {
    "GET /": May.TENANT,
    "GET /events": May.TENANT,
    "GET /web": May.TENANT,
    "GET /openapi.json": May.TENANT,
    "GET /v1/models": May.TENANT,
    "GET /v1/models/{name:path}": May.TENANT,
    "GET /livez": May.ANYONE,
    "GET /readyz": May.ANYONE,
    "GET /health": May.ANYONE,
    "GET /ping": May.ANYONE,
    "POST /ping": May.ANYONE,
    "GET /version": May.TENANT,
    "GET /metrics": May.OPERATOR,
    "POST /v1/completions": May.TENANT,
    "POST /v1/chat/completions": May.TENANT,
    "POST /v1/messages": May.TENANT,
    "POST /v1/messages/count_tokens": May.TENANT,
    "POST /v1/responses": May.TENANT,
    "GET /v1/responses/{response_id}": May.TENANT,
    "DELETE /v1/responses/{response_id}": May.TENANT,
    "GET /v1/responses/{response_id}/input_items": May.TENANT,
    "POST /v1/responses/{response_id}/cancel": May.TENANT,
    "POST /v1/responses/input_tokens": May.TENANT,
    "GET /tokenizer_info": May.TENANT,
    "POST /tokenize": May.TENANT,
    "POST /detokenize": May.TENANT,
    f"POST /{SERVICE}/GenerateText": May.TENANT,
}
RPCS: dict[str, tuple[May, Message]] = {
    f"/{SERVICE}/GenerateText": (May.TENANT, generation_pb2.GenerateTextRequest(prompt="x")),
    **{
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo": (
            May.TENANT,
            reflection_pb2.ServerReflectionRequest(list_services=""),
        )
        for version in ("v1", "v1alpha")
    },
    **{
        f"/grpc.health.v1.Health/{method}": (may, health_pb2.HealthCheckRequest())
        for method, may in {"Check": May.ANYONE, "List": May.ANYONE, "Watch": May.TENANT}.items()
    },
}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def keyed(prompts: Prompts, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    entries = [entry(ALICE, "alice"), entry(OPERATOR, "ops", role="operator")]
    async with keyed_rig(prompts, tmp_path_factory.mktemp("keys"), entries) as rig:
        yield rig


def listed(routes: Any) -> set[str]:
    """Return each route as its method and path. HEAD is answered as GET is, and is left out."""
    found = set()
    for route in routes:
        included = getattr(route, "original_router", None)
        if included is not None:
            found |= listed(included.routes)
        elif isinstance(route, Mount):
            found.add(f"GET {route.path}")
        else:
            assert isinstance(route, Route | APIRoute), route
            found |= {
                f"{method} {route.path}" for method in (route.methods or ()) if method != "HEAD"
            }
    return found


async def test_every_route_is_in_the_table() -> None:
    app = create_app(settings(), *unused())
    assert listed(app.routes) == set(ROUTES)
    needs_none = {name.partition(" ")[2] for name, may in ROUTES.items() if may is May.ANYONE}
    assert needs_none == OPEN_PATHS


async def test_every_rpc_is_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    found: set[str] = set()

    def record(_server: object, handlers: Any) -> None:
        for handler in handlers:
            found.update(handler._method_handlers)

    monkeypatch.setattr(type(grpc.aio.server()), "add_generic_rpc_handlers", record)
    Gateway(settings(http_port=0, grpc_listen="127.0.0.1:0"), GatewayMetrics())
    assert found == set(RPCS)


async def status(http: httpx.AsyncClient, route: str, headers: dict[str, str]) -> int:
    """Return the status of a route's answer, without reading the answer's body."""
    method, _, path = route.partition(" ")
    path = {"/web": "/web/main.js"}.get(path, path).replace("{name:path}", "none")
    body: dict[str, object] | None = {} if method == "POST" else None
    async with http.stream(method, path, json=body, headers=headers) as response:
        return response.status_code


@pytest.mark.parametrize("route", ROUTES)
async def test_a_route_is_answered_to_those_in_the_table_alone(keyed: Rig, route: str) -> None:
    for holder, headers in enumerate(({}, auth(ALICE), auth(OPERATOR))):
        may = holder >= ROUTES[route].value
        refused = 403 if holder else 401
        for method in {route, route.replace("GET", "HEAD")}:
            found = await status(keyed.http, method, headers)
            assert (found not in (401, 403)) if may else (found == refused), (method, found)


@pytest.mark.parametrize(
    "path", ["/none", "/v1/none", "/web/none", "//metrics", "/livez/", "/livez%0A"]
)
async def test_any_other_path_needs_a_key(keyed: Rig, path: str) -> None:
    url = httpx.URL(keyed.gateway.http_url).copy_with(raw_path=path.encode())
    assert (await keyed.http.get(url)).status_code == 401
    assert (await keyed.http.get(url, headers=auth(ALICE))).status_code in (200, 307, 404)


@pytest.mark.parametrize("method", RPCS)
async def test_an_rpc_is_answered_to_those_in_the_table_alone(keyed: Rig, method: str) -> None:
    may, request = RPCS[method]
    for holder, headers in enumerate(({}, auth(ALICE), auth(OPERATOR))):
        code = await call(keyed.gateway.grpc_address, method, request, headers)
        refused = code is grpc.StatusCode.UNAUTHENTICATED
        assert refused is (holder < may.value), (method, holder, code)


async def test_an_unknown_rpc_needs_a_key(keyed: Rig) -> None:
    request = generation_pb2.GenerateTextRequest()
    codes = [
        await call(keyed.gateway.grpc_address, f"/{SERVICE}/None", request, headers)
        for headers in ({}, auth(ALICE))
    ]
    assert codes == [grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED]


async def call(
    address: str, method: str, request: Message, headers: dict[str, str]
) -> grpc.StatusCode:
    """Return the status of a call, OK as soon as a message arrives."""
    async with rpc.dial(address) as channel:
        # A call that streams its request reports INTERNAL if the refusal comes before its write.
        stub: Any = channel.unary_stream(
            method,
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=bytes,
        )
        made = stub(request, metadata=tuple(headers.items()))
        try:
            await anext(aiter(made))
        except StopAsyncIteration:
            return await made.code()
        except grpc.aio.AioRpcError as error:
            return error.code()
        finally:
            made.cancel()
        return grpc.StatusCode.OK
