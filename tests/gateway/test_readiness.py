"""The gateway is ready if and only if a verifier with its tokenizer is; else it says why."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import httpx
import pytest
from gateway_rig import TARGET, Rig, until
from grpc_health.v1 import health_pb2, health_pb2_grpc
from scripted_verifier import Script, ScriptedVerifier, last, plain, ready, serve_verifier

from gateway.config import GatewaySettings
from gateway.metrics import Metrics
from gateway.server import running
from gateway.text.prompts import Prompts
from outrider.errors import OutriderError, Reason
from outrider.process import rpc
from outrider.protocol.messages import FinishReason
from outrider.protocol.model_info import DrafterInfo, Placement, Stage

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def state(rig: Rig) -> tuple[int, dict[str, Any]]:
    response = await rig.http.get("/readyz")
    return response.status_code, response.json()


async def becomes(rig: Rig, status: str) -> tuple[int, dict[str, Any]]:
    async def there() -> bool:
        return bool((await state(rig))[1]["status"] == status)

    await until(there)
    return await state(rig)


async def test_a_ready_verifier_makes_the_gateway_ready(rig: Rig) -> None:
    code, body = await state(rig)
    assert (code, body["status"], body["verifiers"][0]["stage"]) == (200, "ready", "ready")
    assert (await rig.http.get("/health")).status_code == 200
    assert (await rig.http.get("/livez")).status_code == 200


@pytest.mark.parametrize(
    ("changes", "status", "reason", "words"),
    [
        (
            {"stage": Stage.LOADING, "stage_detail": "reading weights 3/7"},
            "loading",
            Reason.NOT_READY,
            "reading weights 3/7",
        ),
        (
            {"stage": Stage.WARMING_UP, "stage_detail": "trial forwards"},
            "loading",
            Reason.NOT_READY,
            "trial forwards",
        ),
        ({"stage": Stage.DRAINING}, "draining", Reason.DRAINING, "draining"),
        (
            {"stage": Stage.FAILED, "stage_detail": "no such file"},
            "failed",
            Reason.NOT_READY,
            "no such file",
        ),
        ({"tokenizer_fingerprint": "f00"}, "failed", Reason.NOT_READY, "fingerprint f00"),
    ],
)
async def test_requests_fail_with_the_reason_of_a_verifier_that_is_not_ready(
    rig: Rig, changes: dict[str, Any], status: str, reason: Reason, words: str
) -> None:
    rig.script.info = replace(rig.script.info, **changes)
    code, body = await becomes(rig, status)
    assert code == 503
    assert words in body["detail"]
    assert (await rig.http.get("/health")).status_code == 503
    response = await rig.http.post("/v1/completions", json={"prompt": "x"})
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (503, reason.name.lower())
    # Any tenant may see this one.
    assert words not in error["message"]
    assert "127.0.0.1" not in error["message"]
    channel = rpc.dial(rig.gateway.grpc_address)
    health = await health_pb2_grpc.HealthStub(channel).Check(
        health_pb2.HealthCheckRequest(service="")
    )
    assert health.status == health_pb2.HealthCheckResponse.NOT_SERVING
    await channel.close()


async def test_the_error_for_another_tokenizer_names_both_fingerprints(rig: Rig) -> None:
    rig.script.info = replace(rig.script.info, tokenizer_fingerprint="f00")
    _, body = await becomes(rig, "failed")
    assert rig.prompts.fingerprint in body["detail"]


async def test_without_one_of_its_drafters_the_gateway_is_degraded(rig: Rig) -> None:
    drafters = tuple(
        DrafterInfo(name, "ngram", Placement(), name == "here", 0, None)
        for name in ("here", "gone")
    )
    rig.script.info = replace(rig.script.info, drafters=drafters)
    code, body = await becomes(rig, "degraded")
    assert (code, body["detail"]) == (200, "drafter gone is lost")
    assert [drafter["connected"] for drafter in body["verifiers"][0]["drafters"]] == [True, False]
    assert (await rig.http.post("/v1/completions", json={"prompt": "x"})).status_code == 200


async def test_a_verifier_that_does_not_answer_is_unavailable_until_it_is_back(rig: Rig) -> None:
    rig.script.unreachable = True
    code, _ = await becomes(rig, "unavailable")
    assert code == 503
    rig.script.unreachable = False
    await becomes(rig, "ready")
    assert (await rig.http.post("/v1/completions", json={"prompt": "x"})).status_code == 200


async def test_metrics_count_requests_and_tokens(rig: Rig) -> None:
    async def value(name: str) -> float:
        lines = (await rig.http.get("/metrics")).text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))

    names = (
        'outrider:request_success_total{finished_reason="length"',
        "outrider:generation_tokens_total",
        "outrider:prompt_tokens_total",
        "outrider:time_to_first_token_seconds_count",
        "outrider:inter_token_latency_seconds_count",
        'outrider:http_responses_total{route="/v1/completions",status="400"}',
    )
    before = [await value(name) for name in names]
    rig.script.answer = lambda _: [plain([5, 6]), last([7], FinishReason.LENGTH)]
    await rig.http.post("/v1/completions", json={"prompt": [1, 2, 3, 4]})
    await rig.http.post("/v1/completions", json={"prompt": ""})
    after = [await value(name) for name in names]
    assert [now - then for now, then in zip(after, before, strict=True)] == [1, 3, 4, 1, 1, 1]
    assert await value("outrider:num_requests_running") == 0


async def test_a_stopping_gateway_finishes_requests_and_refuses_new_ones(
    prompts: Prompts,
) -> None:
    script = Script(
        ready(prompts.fingerprint), lambda _: [plain([5]), 0.6, last([6], FinishReason.LENGTH)]
    )
    server = rpc.Server("outrider.v1.VerifierService")
    serve_verifier(ScriptedVerifier(script), server.grpc)
    [port] = await server.start("127.0.0.1:0")
    settings = GatewaySettings(
        verifier=[f"127.0.0.1:{port}"], tokenizer=TARGET, http_port=0, grpc_listen="127.0.0.1:0"
    )
    async with (
        running(settings, Metrics()) as gateway,
        httpx.AsyncClient(base_url=gateway.http_url) as http,
    ):
        await until(lambda: gateway.router.ready)
        request = asyncio.create_task(http.post("/v1/completions", json={"prompt": "x"}))
        await until(lambda: script.running == 1)
        stopping = asyncio.create_task(gateway.stop())
        await until(lambda: gateway.router.draining)
        with pytest.raises(OutriderError, match="shutting down"):
            gateway.router.pick(None)
        assert (await request).json()["choices"][0]["finish_reason"] == "length"
        await stopping
    await server.stop(0)
