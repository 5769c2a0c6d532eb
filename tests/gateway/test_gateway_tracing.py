"""A request makes a span, with a child span for each sequence. Verifiers get the child's context.

Without tracing, verifiers get no context.
"""

from __future__ import annotations

import asyncio
import logging

import grpc
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from outrider.errors import OutriderError, Reason
from outrider.process.observability import telemetry
from outrider.protocol.messages import TokenChunk
from outrider.v1 import generation_pb2
from tests.gateway.gateway_rig import Rig
from tests.gateway.scripted_verifier import plain
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="session")

TRACE = "a" * 32
PARENT = {"traceparent": f"00-{TRACE}-{'b' * 16}-01"}


def of_requests(spans: InMemorySpanExporter) -> list[ReadableSpan]:
    """Return the spans of whole requests."""
    return [span for span in spans.get_finished_spans() if span.kind is SpanKind.SERVER]


def check_links(rig: Rig, spans: InMemorySpanExporter) -> None:
    """Check that the verifier got the context of a client span for each sequence.

    Each client span must be a child of the request's span.
    """
    [root] = of_requests(spans)
    clients = [span for span in spans.get_finished_spans() if span.kind is SpanKind.CLIENT]
    assert sorted(rig.script.traceparents) == sorted(
        f"00-{TRACE}-{span.context.span_id:016x}-01" for span in clients
    )
    for span in clients:
        assert span.parent is not None
        assert span.parent.span_id == root.context.span_id
        assert span.attributes is not None
        assert span.attributes["server.address"] == rig.gateway.router.replicas[0].address


async def test_nothing_is_sent_when_tracing_is_off(rig: Rig) -> None:
    await rig.http.post("/v1/completions", json={"prompt": "x"}, headers=PARENT)
    assert rig.script.traceparents == []


@pytest.mark.parametrize("stream", [True, False])
async def test_a_span_is_the_clients_child_and_the_verifiers_parent(
    rig: Rig, spans: InMemorySpanExporter, stream: bool
) -> None:
    ids = rig.says("if x")
    asked = {
        "prompt": "x",
        "stream": stream,
        "n": 2,
        "temperature": 0.5,
        "max_tokens": 40,
        "stop": ["never"],
        "seed": 7,
    }
    answer = await rig.http.post("/v1/completions", json=asked, headers=PARENT)
    # The answer may be complete a moment before its span ends.
    await until(lambda: len(of_requests(spans)) == 1)
    [span] = of_requests(spans)
    assert span.name == "text_completion models/target"
    assert span.kind is SpanKind.SERVER
    assert span.parent is not None
    assert span.parent.span_id == 0xBBBBBBBBBBBBBBBB
    assert len(rig.script.traceparents) == 2
    check_links(rig, spans)
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
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
    }
    assert {name: attributes[name] for name in conventions} == conventions
    assert span.status.status_code is StatusCode.UNSET
    assert "error.type" not in attributes


async def test_log_lines_of_a_request_carry_the_ids_of_its_trace(
    rig: Rig, spans: InMemorySpanExporter, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.handler.setFormatter(telemetry.TextFormatter("%(message)s"))
    rig.says("if x")
    with caplog.at_level(logging.INFO, "gateway.access"):
        for stream in (True, False):
            await rig.http.post(
                "/v1/completions", json={"prompt": "x", "stream": stream}, headers=PARENT
            )
    logged = [line for line in caplog.text.splitlines() if line.startswith("response ")]
    assert len(logged) == 2
    for line, span in zip(logged, of_requests(spans), strict=True):
        assert line.endswith(f" trace_id={TRACE} span_id={span.context.span_id:016x}")


@pytest.mark.parametrize("stream", [True, False])
async def test_a_span_is_an_error_only_if_the_server_failed(
    rig: Rig, spans: InMemorySpanExporter, stream: bool
) -> None:
    expected = [
        (Reason.INTERNAL, StatusCode.ERROR, 500),
        (Reason.OVERLOADED, StatusCode.UNSET, 429),
        (Reason.INVALID_VALUE, StatusCode.UNSET, 400),
    ]
    for reason, _, _ in expected:
        rig.script.play(OutriderError(reason, "broken"))
        await rig.http.post("/v1/completions", json={"prompt": "x", "stream": stream})
    seen = [
        (
            span.status.status_code,
            dict(span.attributes or {})["error.type"],
            dict(span.attributes or {})["http.response.status_code"],
        )
        for span in of_requests(spans)
    ]
    assert seen == [(status, reason.name.lower(), code) for reason, status, code in expected]


@pytest.mark.parametrize(("chunks", "stream"), [([], False), ([plain([5])], True)])
async def test_a_span_is_no_error_if_the_client_hangs_up(
    rig: Rig, spans: InMemorySpanExporter, chunks: list[TokenChunk], stream: bool
) -> None:
    rig.script.answer = lambda _: [*chunks, 60.0]
    request = asyncio.create_task(
        rig.client.completions.create(model="models/target", prompt="x", stream=stream)
    )
    await until(lambda: rig.script.running == 1)
    if stream and chunks:
        await (await request).close()
    else:
        request.cancel()
    await until(lambda: len(of_requests(spans)) == 1)
    [span] = of_requests(spans)
    assert span.status.status_code is StatusCode.UNSET
    attributes = dict(span.attributes or {})
    assert attributes["error.type"] == "client_gone"
    assert attributes["http.response.status_code"] == (200 if stream and chunks else 499)


async def test_grpc_is_traced_as_well(rig: Rig, spans: InMemorySpanExporter) -> None:
    call = rig.generation.GenerateText(
        generation_pb2.GenerateTextRequest(prompt="x"), metadata=tuple(PARENT.items())
    )
    _ = [response async for response in call]
    [span] = of_requests(spans)
    assert f"{span.context.trace_id:032x}" == TRACE
    assert len(rig.script.traceparents) == 1
    check_links(rig, spans)
    assert span.status.status_code is StatusCode.UNSET
    attributes = dict(span.attributes or {})
    assert {name: value for name, value in attributes.items() if name.startswith("rpc.")} == {
        "rpc.system.name": "grpc",
        "rpc.method": "outrider.v1.GenerationService/GenerateText",
        "rpc.response.status_code": "OK",
    }


async def test_the_span_of_a_grpc_call_names_how_the_call_ended(
    rig: Rig, spans: InMemorySpanExporter
) -> None:
    rig.script.answer = lambda _: [plain([5]), 60.0]
    call = rig.generation.GenerateText(generation_pb2.GenerateTextRequest(prompt="x"))
    await anext(aiter(call))
    call.cancel()
    await until(lambda: len(of_requests(spans)) == 1)
    rig.script.answer = lambda _: [OutriderError(Reason.INVALID_VALUE, "no")]
    with pytest.raises(grpc.aio.AioRpcError):
        _ = [
            response
            async for response in rig.generation.GenerateText(
                generation_pb2.GenerateTextRequest(prompt="x")
            )
        ]
    cancelled, refused = of_requests(spans)
    assert [span.status.status_code for span in (cancelled, refused)] == [StatusCode.UNSET] * 2
    assert dict(cancelled.attributes or {})["rpc.response.status_code"] == "CANCELLED"
    assert "error.type" not in (cancelled.attributes or {})
    assert dict(refused.attributes or {})["rpc.response.status_code"] == "INVALID_ARGUMENT"
    assert dict(refused.attributes or {})["error.type"] == "invalid_value"
