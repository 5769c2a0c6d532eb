"""A request is one span whose context reaches the verifier; with tracing off nothing is sent."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from gateway_rig import Rig
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from outrider import telemetry
from outrider.errors import OutriderError, Reason
from outrider.v1 import generation_pb2

pytestmark = pytest.mark.asyncio(loop_scope="session")

TRACE = "a" * 32
PARENT = {"traceparent": f"00-{TRACE}-{'b' * 16}-01"}


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    telemetry.setup("gateway", SimpleSpanProcessor(exporter))
    yield exporter
    telemetry.shutdown()


async def test_nothing_is_sent_when_tracing_is_off(rig: Rig) -> None:
    await rig.http.post("/v1/completions", json={"prompt": "x"}, headers=PARENT)
    assert rig.script.traceparents == []


@pytest.mark.parametrize("stream", [True, False])
async def test_the_span_is_a_child_of_the_clients_and_the_parent_of_the_verifiers(
    rig: Rig, spans: InMemorySpanExporter, stream: bool
) -> None:
    ids = rig.says("if x")
    asked = {"prompt": "x", "stream": stream, "n": 2, "temperature": 0.5, "max_tokens": 40, "stop": ["never"], "seed": 7}
    answer = await rig.http.post("/v1/completions", json=asked, headers=PARENT)
    [span] = spans.get_finished_spans()
    assert span.name == "text_completion models/target"
    assert span.kind is SpanKind.SERVER
    assert span.parent is not None
    assert span.parent.span_id == 0xBBBBBBBBBBBBBBBB
    assert rig.script.traceparents == [f"00-{TRACE}-{span.context.span_id:016x}-01"] * 2
    attributes = dict(span.attributes or {})
    conventions = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "outrider",
        "gen_ai.request.model": "models/target",
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.max_tokens": 40,
        "gen_ai.request.stop_sequences": ("never",),
        "gen_ai.request.seed": "7",
        "gen_ai.response.id": answer.headers["x-request-id"],
        "gen_ai.response.finish_reasons": ("stop", "stop"),
        "gen_ai.usage.output_tokens": 2 * (len(ids) + 1),
    }
    assert {name: attributes[name] for name in conventions} == conventions


async def test_what_a_request_logs_carries_the_ids_of_its_trace(
    rig: Rig, spans: InMemorySpanExporter, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.handler.setFormatter(telemetry.TraceFormatter("%(message)s"))
    rig.says("if x")
    with caplog.at_level(logging.INFO, "gateway.requests"):
        for stream in (True, False):
            await rig.http.post("/v1/completions", json={"prompt": "x", "stream": stream}, headers=PARENT)
    logged = [line for line in caplog.text.splitlines() if "tokens in" in line]
    assert len(logged) == 2
    for line, span in zip(logged, spans.get_finished_spans(), strict=True):
        assert line.endswith(f" trace_id={TRACE} span_id={span.context.span_id:016x}")


async def test_a_failure_is_on_the_span(rig: Rig, spans: InMemorySpanExporter) -> None:
    rig.script.answer = lambda _: [OutriderError(Reason.INTERNAL, "broken")]
    for stream in (True, False):
        await rig.http.post("/v1/completions", json={"prompt": "x", "stream": stream})
    assert [span.status.status_code for span in spans.get_finished_spans()] == [StatusCode.ERROR] * 2


async def test_grpc_is_traced_as_well(rig: Rig, spans: InMemorySpanExporter) -> None:
    call = rig.generation.GenerateText(generation_pb2.GenerateTextRequest(prompt="x"), metadata=tuple(PARENT.items()))
    _ = [response async for response in call]
    [span] = spans.get_finished_spans()
    assert f"{span.context.trace_id:032x}" == TRACE
    assert rig.script.traceparents == [f"00-{TRACE}-{span.context.span_id:016x}-01"]
