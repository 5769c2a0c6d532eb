"""The gateway is ready only with a ready verifier of the same tokenizer; else it says why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.errors import Reason
from outrider.process.network import rpc
from outrider.protocol.messages import FinishReason
from outrider.protocol.model_info import DrafterInfo, Placement, Stage
from tests.gateway.gateway_rig import Rig
from tests.gateway.scripted_verifier import last, plain
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def state(rig: Rig) -> tuple[int, dict[str, Any]]:
    response = await rig.http.get("/readyz")
    return response.status_code, response.json()


async def gauges(rig: Rig) -> tuple[float, float, float]:
    """Return the alerts' figures: ready (0 or 1), degraded (0 or 1), number of lost drafters."""
    text = (await rig.http.get("/metrics")).text
    names = ("outrider:ready", "outrider:degraded", "outrider:drafters_lost")
    lines = [line.split() for line in text.splitlines() if line.startswith(names)]
    values = {name: float(value) for name, value in lines}
    return values[names[0]], values[names[1]], values[names[2]]


async def becomes(rig: Rig, status: str) -> tuple[int, dict[str, Any]]:
    async def there() -> bool:
        return bool((await state(rig))[1]["status"] == status)

    await until(there)
    return await state(rig)


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
    assert await gauges(rig) == (0, 0, 0)
    assert words in body["detail"]
    assert (await rig.http.get("/health")).status_code == 503
    response = await rig.http.post("/v1/completions", json={"prompt": "x"})
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (503, reason.name.lower())
    # Any tenant may see this error.
    assert words not in error["message"]
    assert "127.0.0.1" not in error["message"]
    channel = rpc.dial(rig.gateway.grpc_address)
    health = await health_pb2_grpc.HealthStub(channel).Check(
        health_pb2.HealthCheckRequest(service="")
    )
    assert health.status == health_pb2.HealthCheckResponse.NOT_SERVING
    await channel.close(None)


async def test_without_one_of_its_drafters_the_gateway_is_degraded(rig: Rig) -> None:
    drafters = tuple(
        DrafterInfo(name, "ngram", Placement(), name == "here", 0, None)
        for name in ("here", "gone")
    )
    rig.script.info = replace(rig.script.info, drafters=drafters)
    code, body = await becomes(rig, "degraded")
    assert (code, body["detail"]) == (200, "drafter gone is lost")
    assert await gauges(rig) == (1, 1, 1)
    assert [drafter["connected"] for drafter in body["verifiers"][0]["drafters"]] == [True, False]
    assert (await rig.http.post("/v1/completions", json={"prompt": "x"})).status_code == 200


async def test_a_verifier_that_does_not_answer_is_unavailable_until_it_is_back(rig: Rig) -> None:
    rig.script.unreachable = True
    code, _ = await becomes(rig, "unavailable")
    assert code == 503
    rig.script.unreachable = False
    await becomes(rig, "ready")
    assert await gauges(rig) == (1, 0, 0)
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
