"""The gateway refuses foreign Host and Origin headers unless its operator allows them."""

from __future__ import annotations

import re
import socket
from typing import Any

import httpx
import pytest

from gateway.access.gate import Gate
from gateway.access.origins import allowed_hosts, host_allowed, origin_pattern
from gateway.app import create_app
from gateway.config import GatewaySettings
from gateway.generation.generate import Generation
from gateway.metrics import GatewayMetrics
from gateway.text.prompts import Prompts
from gateway.upstream.routing import Router
from tests.gateway.gateway_rig import TARGET, Rig

pytestmark = pytest.mark.asyncio(loop_scope="session")

BODY = {"prompt": "if x", "temperature": 0}


def settings(**given: Any) -> GatewaySettings:
    return GatewaySettings(verifier=["127.0.0.1:9"], tokenizer=TARGET, **given)


HOSTS = [
    # name, bound to, allowed, accepted
    ("localhost:8000", "127.0.0.1", [], True),
    ("127.0.0.1:8000", "127.0.0.1", [], True),
    ("127.0.0.1", "127.0.0.1", [], True),
    ("[::1]:8000", "127.0.0.1", [], True),
    ("[::1]", "::", [], True),
    ("10.1.2.3:8000", "0.0.0.0", [], True),  # a probe of Kubernetes
    ("app.localhost:8000", "127.0.0.1", [], True),
    (f"{socket.gethostname().lower()}:8000", "127.0.0.1", [], True),
    ("evil.example", "127.0.0.1", [], False),
    ("evil.example:8000", "0.0.0.0", [], False),
    ("localhost.evil.example", "127.0.0.1", [], False),
    ("evillocalhost", "127.0.0.1", [], False),
    ("127.0.0.1.evil.example", "0.0.0.0", [], False),
    ("gateway:8000", "127.0.0.1", [], False),
    ("gateway:8000", "0.0.0.0", [], True),  # another container of compose's network
    ("gateway:8000", "::", [], True),
    ("llm.example.com", "0.0.0.0", ["llm.example.com"], True),
    ("llm.example.com.:443", "0.0.0.0", ["LLM.example.com"], True),
    ("a.example.com", "0.0.0.0", ["*.example.com"], True),
    ("example.com", "0.0.0.0", ["*.example.com"], False),
    ("evil.example", "0.0.0.0", ["llm.example.com"], False),
    ("evil.example", "127.0.0.1", ["*"], True),
    ("gpu7.lan:8000", "gpu7.lan", [], True),
]


@pytest.mark.parametrize(("host", "bound", "allowed", "accepted"), HOSTS)
async def test_a_host_header_names_this_gateway_or_another_host(
    host: str, bound: str, allowed: list[str], accepted: bool
) -> None:
    patterns = allowed_hosts(settings(http_host=bound, allowed_hosts=allowed, open=True))
    assert host_allowed(host, patterns) is accepted


@pytest.mark.parametrize(
    "path", ["/", "/events", "/readyz", "/metrics", "/v1/models", "/web/index.html"]
)
async def test_a_request_with_a_foreign_host_is_refused(rig: Rig, path: str) -> None:
    answer = await rig.http.get(path, headers={"host": "evil.example"})
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "host_not_allowed"
    assert "--allowed-hosts" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://localhost:1", "https://127.0.0.1"]
)
async def test_a_request_with_a_foreign_origin_is_refused(rig: Rig, origin: str) -> None:
    for answer in (
        await rig.http.post("/v1/completions", json=BODY, headers={"origin": origin}),
        await rig.http.options(
            "/v1/completions", headers={"origin": origin, "access-control-request-method": "POST"}
        ),
    ):
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "origin_not_allowed")
        assert "access-control-allow-origin" not in answer.headers
    assert rig.script.requests == []


async def test_the_page_may_call_the_gateway_behind_a_tls_proxy() -> None:
    app = create_app(settings(allowed_hosts=["llm.example.com"]), *unused())
    headers = {"host": "llm.example.com", "origin": "https://llm.example.com"}
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://localhost"
    ) as http:
        assert (await http.get("/livez", headers=headers)).status_code == 200
        assert (
            await http.get("/livez", headers=headers | {"origin": "https://example.com"})
        ).status_code == 403


def unused() -> tuple[Any, GatewayMetrics, Gate]:
    """Return the dependencies that only routes outside these tests need."""
    metrics = GatewayMetrics()
    prompts = Prompts(TARGET)
    generation = Generation(Router([], prompts.fingerprint), prompts, metrics, 0.0)
    return generation, metrics, Gate(settings())


async def test_a_preflight_allows_every_method_of_every_route() -> None:
    app = create_app(settings(allowed_origins=["https://chat.example.com"]), *unused())
    paths = app.openapi()["paths"]
    methods = {"HEAD", *(method.upper() for operations in paths.values() for method in operations)}
    assert methods == {"DELETE", "GET", "HEAD", "POST"}
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://localhost:8000"
    ) as http:
        for method in methods:
            asked = {
                "origin": "https://chat.example.com",
                "access-control-request-method": method,
            }
            preflight = await http.options("/v1/responses/resp-1", headers=asked)
            assert (method, preflight.status_code) == (method, 200)


async def test_an_allowed_website_gets_its_preflight_and_its_answers() -> None:
    app = create_app(
        settings(allowed_origins=["https://chat.example.com", "http://localhost:*"]), *unused()
    )
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://localhost:8000"
    ) as http:
        for origin in (
            "https://chat.example.com",
            "http://localhost:5173",
            "http://localhost:3000",
        ):
            asked = {
                "origin": origin,
                "access-control-request-method": "POST",
                "access-control-request-headers": "authorization,content-type,x-stainless-lang",
            }
            preflight = await http.options("/v1/chat/completions", headers=asked)
            assert preflight.status_code == 200
            assert preflight.headers["access-control-allow-origin"] == origin
            assert "x-stainless-lang" in preflight.headers["access-control-allow-headers"]
            refused = await http.post(
                "/v1/chat/completions", json={"messages": []}, headers={"origin": origin}
            )
            assert refused.status_code == 400
            assert refused.headers["access-control-allow-origin"] == origin
        for origin in (
            "https://evil.example",
            "https://chat.example.com.evil.example",
            "https://localhost:1",
        ):
            assert (await http.get("/livez", headers={"origin": origin})).status_code == 403


@pytest.mark.parametrize(
    ("entries", "origin", "matches"),
    [
        (["*"], "null", True),
        ([], "", False),
        (["http://localhost:*"], "http://localhost:5173", True),
        (["http://localhost:*"], "http://localhost", False),
        (["https://*.example.com"], "https://a.b.example.com", True),
        (["https://*.example.com"], "https://evil.example/.example.com", False),
        (["https://a.example/"], "https://a.example", True),
        (["https://a.example"], "https://aXexample", False),
    ],
)
async def test_an_origin_matches_its_entry_as_a_whole(
    entries: list[str], origin: str, matches: bool
) -> None:
    assert (re.fullmatch(origin_pattern(entries), origin) is not None) is matches
