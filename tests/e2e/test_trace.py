"""One request makes one connected trace through gateway, verifier and drafters."""

import asyncio
from typing import Any

import httpx
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from tests.stack import TARGET, GatewayProcess, Stack
from tests.trace_collector import attributes, collecting

LEFT = "c" * 32
"""Trace id of a request whose client leaves."""


async def complete(url: str) -> None:
    """Request one completion."""
    body = {
        "model": TARGET,
        "prompt": "def read_file(path, encoding=None):\n    ",
        "max_tokens": 64,
        "temperature": 0,
    }
    async with httpx.AsyncClient(base_url=url, timeout=30) as client:
        response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text


async def hang_up(url: str) -> None:
    """Request a streamed completion, and leave after the first chunk."""
    body = {
        "model": TARGET,
        "prompt": "def read_file(",
        "max_tokens": 1500,
        "ignore_eos": True,
        "stream": True,
    }
    headers = {"traceparent": f"00-{LEFT}-{'b' * 16}-01"}
    async with (
        httpx.AsyncClient(base_url=url, timeout=30) as client,
        client.stream("POST", "/v1/completions", json=body, headers=headers) as response,
    ):
        await anext(response.aiter_lines())


async def traced_requests(patch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Every (service, span) of a stack that answered one request and lost a client."""
    async with collecting() as (collector, endpoint):
        # The processes inherit it.
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        stack = Stack("--always-draft")
        stack.add_drafter("ngram-traced", "ngram")
        stack.add_drafter("model-traced", "model")
        await asyncio.to_thread(stack.wait_ready)
        gateway = GatewayProcess(stack.address)
        await asyncio.to_thread(gateway.wait_ready)
        await complete(gateway.url)
        await hang_up(gateway.url)
        # Each process sends its last spans when it stops.
        await asyncio.to_thread(gateway.close)
        await asyncio.to_thread(stack.stop)
    assert {"ngram-traced", "model-traced"} <= collector.instances
    return collector.spans


def check_kinds(spans: list[tuple[str, Any]]) -> None:
    """What goes from one service to another has a pair of kinds, so that a graph has the edge."""
    by_id = {span.span_id: (service, span) for service, span in spans}
    edges = set()
    for service, span in spans:
        if span.parent_span_id in by_id:
            caller, parent = by_id[span.parent_span_id]
            if caller != service:
                edges.add((caller, service, parent.kind, span.kind))
    verifier, gateway, drafter = "outrider-verifier", "outrider-gateway", "outrider-drafter"
    assert (gateway, verifier, Span.SPAN_KIND_CLIENT, Span.SPAN_KIND_SERVER) in edges
    assert (verifier, drafter, Span.SPAN_KIND_PRODUCER, Span.SPAN_KIND_CONSUMER) in edges


def check_tree(spans: list[tuple[str, Any]]) -> None:
    """The spans of a request are those of all three services, below one root of the gateway."""
    assert {(service.removeprefix("outrider-"), span.name) for service, span in spans} == {
        ("gateway", f"text_completion {TARGET}"),
        ("gateway", "generate_tokens"),
        ("verifier", "generate_tokens"),
        ("verifier", "queue"),
        ("verifier", "prefill"),
        ("verifier", "verify"),
        ("drafter", "propose"),
        ("drafter", "rewind"),
    }
    names = {span.span_id: span.name for _, span in spans}
    roots = [service for service, span in spans if span.parent_span_id not in names]
    assert roots == ["outrider-gateway"]
    # The first proposal follows the prompt, later ones follow a step.
    parents = {names[span.parent_span_id] for _, span in spans if span.name == "propose"}
    assert parents == {"generate_tokens", "verify"}


def check_attributes(spans: list[tuple[str, Any]]) -> None:
    """Proposals have family and length, steps have their wait and the lookups of drafts."""
    proposals = [attributes(span) for _, span in spans if span.name == "propose"]
    families = {proposal["outrider.family"].string_value for proposal in proposals}
    assert families == {"ngram", "model"}
    assert all(proposal["outrider.draft_tokens"].int_value > 0 for proposal in proposals)
    steps = [attributes(span) for _, span in spans if span.name == "verify"]
    assert all(step["outrider.wait_seconds"].double_value >= 0 for step in steps)
    [served] = [
        attributes(span)
        for service, span in spans
        if (service, span.name) == ("outrider-verifier", "generate_tokens")
    ]
    assert served["outrider.outcome"].string_value in ("stop", "length")
    assert served["gen_ai.usage.output_tokens"].int_value > 0
    lookups = [step["outrider.lookups"] for step in steps if "outrider.lookups" in step]
    assert any("wasted" in value.string_value for value in lookups)


@pytest.mark.slow
async def test_one_request_makes_one_connected_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spans = await traced_requests(monkeypatch)
    states = {span.status.code for _, span in spans}
    assert states == {Status.STATUS_CODE_UNSET}, "a client that leaves is not an error"
    traces = {span.trace_id for _, span in spans if span.name == "generate_tokens"}
    assert bytes.fromhex(LEFT) in traces
    traces.remove(bytes.fromhex(LEFT))
    assert len(traces) == 1
    request = [(service, span) for service, span in spans if span.trace_id in traces]
    check_tree(request)
    check_attributes(request)
    check_kinds(request)
