"""One request makes one connected trace through gateway, verifier and drafters."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import httpx
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Status
from stack import TARGET, GatewayProcess, Stack

from outrider import __version__

LEFT = "c" * 32
"""Trace id of a request whose client leaves."""


def attributes(owner: Any) -> dict[str, Any]:
    """The values by name of a span's or a resource's attributes."""
    return {attribute.key: attribute.value for attribute in owner.attributes}


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Collects pairs of service and span."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []

    async def Export(self, request: Any, context: Any) -> Any:
        """Take one batch of spans."""
        for resource in request.resource_spans:
            known = attributes(resource.resource)
            assert known["service.version"].string_value == __version__
            name = known["service.name"].string_value
            spans = [span for scope in resource.scope_spans for span in scope.spans]
            self.spans += [(name, span) for span in spans]
        return trace_service_pb2.ExportTraceServiceResponse()


@asynccontextmanager
async def collecting() -> AsyncIterator[tuple[Collector, str]]:
    """Run a collector; yields it and its URL."""
    server = grpc.aio.server()
    collector = Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield collector, f"http://127.0.0.1:{port}"
    await server.stop(0)


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
    return collector.spans


def check_tree(spans: list[tuple[str, Any]]) -> None:
    """The spans of a request are those of all three services, below one root of the gateway."""
    assert {(service.removeprefix("outrider-"), span.name) for service, span in spans} == {
        ("gateway", f"text_completion {TARGET}"),
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
