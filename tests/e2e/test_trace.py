"""One request is one connected trace through gateway, verifier and drafter, as a collector sees it."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import httpx
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Status
from stack import TARGET, Process, Stack, free_port

from outrider import __version__

LEFT = "c" * 32
"""The trace of a request whose client leaves."""


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps what it is sent: (service, span)."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []

    async def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            known = {
                attribute.key: attribute.value.string_value
                for attribute in resource.resource.attributes
            }
            assert known["service.version"] == __version__
            self.spans += [
                (known["service.name"], span)
                for scope in resource.scope_spans
                for span in scope.spans
            ]
        return trace_service_pb2.ExportTraceServiceResponse()


@asynccontextmanager
async def collecting() -> AsyncIterator[tuple[Collector, str]]:
    server, collector = grpc.aio.server(), Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield collector, f"http://127.0.0.1:{port}"
    await server.stop(0)


async def complete(url: str) -> None:
    """One completion, as soon as the gateway takes it."""
    body = {
        "model": TARGET,
        "prompt": "def read_file(path, encoding=None):\n    ",
        "max_tokens": 64,
        "temperature": 0,
    }
    deadline = time.monotonic() + 60
    async with httpx.AsyncClient(base_url=url, timeout=30) as client:
        while True:
            try:
                response = await client.post("/v1/completions", json=body)
                if response.status_code == 200:
                    return
            except httpx.TransportError:
                pass
            assert time.monotonic() < deadline
            await asyncio.sleep(0.2)


async def hang_up(url: str) -> None:
    """A streamed completion whose client leaves after the first chunk."""
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


@pytest.mark.slow
async def test_one_request_makes_one_connected_trace() -> None:
    async with collecting() as (collector, endpoint):
        tracing = ("--otlp-endpoint", endpoint)
        stack = Stack(*tracing, "--always-draft")
        stack.add_drafter("ngram-traced", "ngram", *tracing)
        stack.add_drafter("model-traced", "model", *tracing)
        await asyncio.to_thread(stack.wait_ready)
        port = free_port()
        addresses = ["--http-port", str(port), "--grpc-listen", "127.0.0.1:0"]
        gateway = Process(
            "gateway", "--verifier", stack.address, "--tokenizer", TARGET, *addresses, *tracing
        )
        await complete(f"http://127.0.0.1:{port}")
        await hang_up(f"http://127.0.0.1:{port}")
        # Stopping sends what is left.
        await asyncio.to_thread(gateway.stop)
        gateway.log.close()
        await asyncio.to_thread(stack.stop)
    failed = [
        (span.name, span.status)
        for _, span in collector.spans
        if span.status.code != Status.STATUS_CODE_UNSET
    ]
    assert failed == [], "neither a finished request nor a client that leaves is an error"
    traces = {span.trace_id for service, span in collector.spans if span.name == "generate_tokens"}
    assert bytes.fromhex(LEFT) in traces
    traces.remove(bytes.fromhex(LEFT))
    assert len(traces) == 1
    spans = [(service, span) for service, span in collector.spans if span.trace_id in traces]
    assert {service for service, _ in spans} == {
        "outrider-gateway",
        "outrider-verifier",
        "outrider-drafter",
    }
    names = {(service.removeprefix("outrider-"), span.name) for service, span in spans}
    assert names == {
        ("gateway", f"text_completion {TARGET}"),
        ("verifier", "generate_tokens"),
        ("verifier", "queue"),
        ("verifier", "prefill"),
        ("verifier", "verify"),
        ("drafter", "propose"),
        ("drafter", "rewind"),
    }
    known = {span.span_id for _, span in spans}
    roots = [(service, span) for service, span in spans if span.parent_span_id not in known]
    assert [service for service, _ in roots] == ["outrider-gateway"]
    proposals = [span for _, span in spans if span.name == "propose"]
    proposed = [
        {attribute.key: attribute.value for attribute in span.attributes} for span in proposals
    ]
    assert {attributes["outrider.family"].string_value for attributes in proposed} == {
        "ngram",
        "model",
    }
    assert all(attributes["outrider.draft_tokens"].int_value > 0 for attributes in proposed)
    parents = {span.span_id: span.name for _, span in spans}
    assert {parents[span.parent_span_id] for span in proposals} == {"generate_tokens", "verify"}, (
        "the first follows the prompt"
    )
    steps = [
        {attribute.key: attribute.value for attribute in span.attributes}
        for _, span in spans
        if span.name == "verify"
    ]
    assert all(step["outrider.wait_seconds"].double_value >= 0 for step in steps)
    assert any(
        "wasted" in step["outrider.lookups"].string_value
        for step in steps
        if "outrider.lookups" in step
    )
