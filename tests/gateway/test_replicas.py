"""A verifier that goes before it has said anything leaves its requests to the others."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio
from gateway_rig import TARGET, echo, until
from scripted_verifier import Script, ScriptedVerifier, plain, ready

from gateway import routing
from gateway.config import GatewaySettings
from gateway.metrics import Metrics
from gateway.prompts import Prompts
from gateway.server import Gateway, running
from outrider import rpc
from outrider.errors import OutriderError, Reason
from outrider.v1 import verifier_pb2_grpc

pytestmark = pytest.mark.asyncio(loop_scope="session")


class Pair:
    """A gateway with two verifiers; `first` is the one that is asked first, since neither is busy."""

    def __init__(self, prompts: Prompts) -> None:
        self.first, self.second = (Script(ready(prompts.fingerprint), echo) for _ in range(2))
        self.servers: list[rpc.Server] = []
        self.gateway: Gateway
        self.http: httpx.AsyncClient

    async def ask(self, *, stream: bool = False) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"prompt": "if x", "temperature": 0, "stream": stream})


@pytest_asyncio.fixture(loop_scope="session")
async def pair(prompts: Prompts, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pair]:
    # What a poll finds is tested elsewhere; here nothing is known but what the request itself meets.
    monkeypatch.setattr(routing, "_POLL_READY_S", 60.0)
    made = Pair(prompts)
    async with contextlib.AsyncExitStack() as stack:
        addresses = []
        for script in (made.first, made.second):
            server = rpc.Server("outrider.v1.VerifierService")
            verifier_pb2_grpc.add_VerifierServiceServicer_to_server(ScriptedVerifier(script), server.grpc)
            [port] = await server.start("127.0.0.1:0")
            stack.push_async_callback(server.stop, 0)
            made.servers.append(server)
            addresses.append(f"127.0.0.1:{port}")
        settings = GatewaySettings(verifier=addresses, tokenizer=TARGET, http_port=0, grpc_listen="127.0.0.1:0")
        made.gateway = await stack.enter_async_context(running(settings, Metrics()))
        made.http = await stack.enter_async_context(httpx.AsyncClient(base_url=made.gateway.http_url))
        await until(lambda: all(replica.problem is None for replica in made.gateway.router.replicas))
        yield made


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reason", [Reason.DRAINING, Reason.NOT_READY])
async def test_one_that_takes_nothing_any_more_costs_no_request(pair: Pair, reason: Reason, stream: bool) -> None:
    pair.first.answer = lambda _: [OutriderError(reason, "not now", retry_after_s=1.0)]
    for _ in range(3):
        response = await pair.ask(stream=stream)
        assert response.status_code == 200
        assert "if x" in response.text
    # It was asked once; then it was known.
    assert (len(pair.first.requests), len(pair.second.requests)) == (1, 3)
    assert 'outrider:request_failure_total{model_name="models/target"' not in (await pair.http.get("/metrics")).text


async def test_one_that_is_gone_costs_no_request(pair: Pair) -> None:
    await pair.servers[0].stop(0)
    response = await pair.ask()
    assert (response.status_code, response.json()["choices"][0]["text"]) == (200, "if x")
    assert [replica.running for replica in pair.gateway.router.replicas] == [0, 0]


async def test_what_was_begun_is_not_begun_elsewhere(pair: Pair) -> None:
    pair.first.answer = lambda request: [plain(request.prompt[:1]), OutriderError(Reason.DRAINING, "too late")]
    response = await pair.ask(stream=True)
    assert '"code":"draining"' in response.text.replace(" ", "")
    assert pair.second.requests == []


@pytest.mark.parametrize("reason", [Reason.INTERNAL, Reason.OVERLOADED, Reason.INVALID_VALUE])
async def test_what_another_one_would_say_as_well_is_not_asked_twice(pair: Pair, reason: Reason) -> None:
    pair.first.answer = lambda _: [OutriderError(reason, "no")]
    assert (await pair.ask()).json()["error"]["code"] == reason.name.lower()
    assert pair.second.requests == []


async def test_when_all_go_the_last_one_says_why(pair: Pair) -> None:
    pair.first.answer = lambda _: [OutriderError(Reason.DRAINING, "the first goes", retry_after_s=1.0)]
    pair.second.answer = lambda _: [OutriderError(Reason.DRAINING, "the second goes", retry_after_s=1.0)]
    response = await pair.ask()
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert response.json()["error"]["message"] == "the second goes"
