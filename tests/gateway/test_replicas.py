"""If a verifier fails before a sequence's first chunk, the sequence moves to another verifier."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
import pytest_asyncio
from gateway_rig import TARGET, echo, until
from scripted_verifier import Script, ScriptedVerifier, ready, serve_verifier

from gateway.config import GatewaySettings
from gateway.metrics import Metrics
from gateway.server import Gateway, running
from gateway.text.prompts import Prompts
from gateway.upstream import routing
from gateway.upstream.routing import Pick
from outrider.errors import OutriderError, Reason
from outrider.process import rpc
from outrider.v1 import generation_pb2_grpc
from outrider.v1.generation_pb2 import GenerateTextRequest

pytestmark = pytest.mark.asyncio(loop_scope="session")


class Pair:
    """A gateway with two verifiers. While neither is busy, it picks `first`."""

    def __init__(self, prompts: Prompts) -> None:
        self.first = Script(ready(prompts.fingerprint), echo)
        self.second = Script(ready(prompts.fingerprint), echo)
        self.servers: list[rpc.Server] = []
        self.gateway: Gateway
        self.http: httpx.AsyncClient

    async def ask(self, *, stream: bool = False) -> httpx.Response:
        return await self.http.post(
            "/v1/completions", json={"prompt": "if x", "temperature": 0, "stream": stream}
        )


@pytest_asyncio.fixture(loop_scope="session")
async def pair(prompts: Prompts, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pair]:
    # No polls: the gateway must learn from the requests themselves.
    monkeypatch.setattr(routing, "_POLL_READY_S", 60.0)
    made = Pair(prompts)
    async with contextlib.AsyncExitStack() as stack:
        addresses = []
        for script in (made.first, made.second):
            server = rpc.Server("outrider.v1.VerifierService")
            serve_verifier(ScriptedVerifier(script), server.grpc)
            [port] = await server.start("127.0.0.1:0")
            stack.push_async_callback(server.stop, 0)
            made.servers.append(server)
            addresses.append(f"127.0.0.1:{port}")
        settings = GatewaySettings(
            verifier=addresses, tokenizer=TARGET, http_port=0, grpc_listen="127.0.0.1:0"
        )
        made.gateway = await stack.enter_async_context(running(settings, Metrics()))
        made.http = await stack.enter_async_context(
            httpx.AsyncClient(base_url=made.gateway.http_url)
        )
        await until(
            lambda: all(replica.problem is None for replica in made.gateway.router.replicas)
        )
        yield made


def refuse(script: Script, error: OutriderError) -> None:
    """Let a verifier answer requests and polls with an error."""
    script.answer = lambda _: [error]
    script.refusal = error


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reason", [Reason.DRAINING, Reason.NOT_READY])
async def test_a_verifier_that_refuses_requests_costs_no_request(
    pair: Pair, reason: Reason, stream: bool
) -> None:
    refuse(pair.first, OutriderError(reason, "not now", retry_after_s=1.0))
    for _ in range(3):
        response = await pair.ask(stream=stream)
        assert response.status_code == 200
        assert "if x" in response.text
    # The gateway does not try the refusing verifier a second time.
    assert (len(pair.first.requests), len(pair.second.requests)) == (1, 3)
    assert (
        'outrider:request_failure_total{model_name="models/target"'
        not in (await pair.http.get("/metrics")).text
    )


async def test_a_verifier_that_is_gone_costs_no_request(pair: Pair) -> None:
    await pair.servers[0].stop(0)
    response = await pair.ask()
    assert (response.status_code, response.json()["choices"][0]["text"]) == (200, "if x")
    assert [len(replica.sequences) for replica in pair.gateway.router.replicas] == [0, 0]


@pytest.mark.parametrize("reason", [Reason.INTERNAL, Reason.INVALID_VALUE])
async def test_errors_that_another_verifier_would_repeat_are_not_retried(
    pair: Pair, reason: Reason
) -> None:
    pair.first.answer = lambda _: [OutriderError(reason, "no")]
    assert (await pair.ask()).json()["error"]["code"] == reason.name.lower()
    assert pair.second.requests == []


async def test_when_all_verifiers_refuse_the_last_error_is_reported(pair: Pair) -> None:
    refuse(pair.first, OutriderError(Reason.DRAINING, "the first goes", retry_after_s=1.0))
    refuse(pair.second, OutriderError(Reason.DRAINING, "the second goes", retry_after_s=1.0))
    response = await pair.ask()
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert response.json()["error"]["message"] == "the second goes"


async def set_limits(pair: Pair, which: int, **limits: int) -> None:
    """Give one verifier other limits, and let the gateway poll it."""
    script = (pair.first, pair.second)[which]
    script.info = replace(script.info, **limits)
    await pair.gateway.router.replicas[which].refresh(script.info.tokenizer_fingerprint)


def script_picks(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let the router pick the first replica once and then the second. Returns picked addresses."""
    router = pair.gateway.router
    picked: list[str] = []

    def pick(model: str | None) -> Any:
        replica = router.replicas[min(len(picked), 1)]
        picked.append(replica.address)
        return Pick(model or "models/target", replica.info, replica)

    monkeypatch.setattr(router, "pick", pick)
    return picked


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("limits", "body"),
    [
        ({"vocab_size": 4000}, {"banned_token_ids": [4050]}),
        ({"vocab_size": 4000}, {"logit_bias": {"4050": 1}}),
        ({"context_length": 64}, {"max_tokens": 100}),
        ({"context_length": 4}, {"prediction": {"type": "content", "content": "a b c d e f g h"}}),
    ],
)
async def test_a_request_runs_on_the_replica_that_it_was_checked_against(
    pair: Pair,
    monkeypatch: pytest.MonkeyPatch,
    limits: dict[str, int],
    body: dict[str, Any],
    stream: bool,
) -> None:
    await set_limits(pair, 1, **limits)
    picked = script_picks(pair, monkeypatch)
    asked = {"prompt": ["if x", "x"], "n": 2, "stream": stream} | body
    response = await pair.http.post("/v1/completions", json=asked)
    assert (response.status_code, "if x" in response.text) == (200, True), response.text
    assert len(picked) == 1
    assert (len(pair.first.requests), len(pair.second.requests)) == (4, 0)


async def test_a_request_that_moves_is_checked_against_the_next_replica(pair: Pair) -> None:
    await set_limits(pair, 1, vocab_size=4000, context_length=64)
    pair.first.answer = lambda _: [OutriderError(Reason.DRAINING, "not now", retry_after_s=1.0)]
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "if x"}]}
    body["prediction"] = {"type": "content", "content": "x " * 100}
    # The shorter context leaves room for fewer tokens.
    assert (await pair.http.post("/v1/chat/completions", json=body)).status_code == 200
    [refused] = pair.first.requests
    [taken] = pair.second.requests
    assert refused.max_tokens == 2048 - len(refused.prompt)
    assert taken.max_tokens == 64 - len(taken.prompt)
    assert len(refused.prediction) > len(taken.prediction) == 64
    for wrong, field in (
        ({"banned_token_ids": [4050]}, "banned_token_ids"),
        ({"max_tokens": 99}, "max_tokens"),
    ):
        pair.gateway.router.replicas[0].problem = None
        response = await pair.http.post("/v1/chat/completions", json=body | wrong)
        assert (response.status_code, response.json()["error"]["param"]) == (400, field)
        assert "verifier" not in response.json()["error"]["message"]
    assert (len(pair.first.requests), len(pair.second.requests)) == (3, 1)


async def test_a_grpc_request_that_moves_is_checked_against_the_next_replica(pair: Pair) -> None:
    await set_limits(pair, 1, context_length=64)
    pair.first.answer = lambda _: [OutriderError(Reason.DRAINING, "not now", retry_after_s=1.0)]
    async with rpc.dial(pair.gateway.grpc_address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        request = GenerateTextRequest(prompt="if x", prediction="x " * 100)
        responses = [response async for response in stub.GenerateText(request)]
    assert "".join(response.text for response in responses) == "if x"
    [taken] = pair.second.requests
    assert (taken.max_tokens, len(taken.prediction)) == (64 - len(taken.prompt), 64)


async def test_a_replica_lost_during_tokenising_gets_no_request(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    await set_limits(pair, 1, context_length=64)
    encode = Prompts.encode

    async def lose_the_first(self: Prompts, *given: Any, **how: Any) -> list[int]:
        gone = OutriderError(Reason.VERIFIER_UNAVAILABLE, "gone")
        pair.gateway.router.replicas[0].mark_lost(gone)
        return await encode(self, *given, **how)

    monkeypatch.setattr(Prompts, "encode", lose_the_first)
    response = await pair.http.post("/v1/completions", json={"prompt": "if x", "max_tokens": 99})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "max_tokens")
    assert "maximum context length is 64 tokens" in response.json()["error"]["message"]
    assert (pair.first.requests, pair.second.requests) == ([], [])


@pytest.mark.parametrize("n", [1, 3])
async def test_simultaneous_requests_are_spread_over_the_replicas(pair: Pair, n: int) -> None:
    for script in (pair.first, pair.second):
        script.answer = lambda _: [600.0]
    asked = [
        asyncio.create_task(pair.http.post("/v1/completions", json={"prompt": "if x", "n": n}))
        for _ in range(8)
    ]
    try:
        await until(lambda: pair.first.running + pair.second.running == 8 * n)
        assert (pair.first.running, pair.second.running) == (4 * n, 4 * n)
        counts = [len(replica.sequences) for replica in pair.gateway.router.replicas]
        assert counts == [4 * n] * 2
    finally:
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
    await until(
        lambda: [len(replica.sequences) for replica in pair.gateway.router.replicas] == [0, 0]
    )
