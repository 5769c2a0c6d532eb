"""A request is found by its id in the access log, and the log line leads to the request's trace.

The trace is connected through gateway, verifier and drafters.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import Any

import httpx
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.stack import TARGET, GatewayProcess, Stack, behind_gateway
from tests.trace_collector import Collector, attributes, collecting
from tests.waiting import until

pytestmark = pytest.mark.slow

REQUEST_ID = "complaint-7"
Spans = list[tuple[str, Any]]
"""Pairs of a service and one of its spans."""


def lines(output: str, logger: str) -> list[dict[str, Any]]:
    """Return a logger's records about the request in a process's output."""
    records = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return [
        record
        for record in records
        if record["logger"] == logger and record["request_id"] == REQUEST_ID
    ]


async def asked(gateway: GatewayProcess) -> dict[str, Any]:
    """Send the request; return the answer's usage."""
    headers = {"x-request-id": REQUEST_ID, "authorization": "Bearer somebody"}
    prompt = "def read_file(path, encoding=None):\n    "
    body = {"prompt": prompt, "max_tokens": 64, "temperature": 0}
    async with httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=60) as client:
        answer = await client.post("/v1/completions", json=body)
        assert answer.json()["id"] == answer.headers["x-request-id"] == REQUEST_ID
        return answer.json()["usage"]


def check_logs(gateway: str, verifier: str, usage: dict[str, Any]) -> dict[str, Any]:
    """Return the gateway's log line.

    The line must agree with the verifier's line and with the answer.
    """
    [line] = lines(gateway, "gateway.access")
    [served] = lines(verifier, "verifier.access")
    assert line["status"] == "200"
    assert line["tenant"] == served["tenant"] != ""
    assert line["trace_id"] == served["trace_id"]
    for each in (line, served):
        assert each["prompt_tokens"] == usage["prompt_tokens"]
        assert each["completion_tokens"] == usage["completion_tokens"]
    return line


def check_kinds(spans: Spans) -> None:
    """Check that spans of a call between services have matching kinds, as a service graph needs."""
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


def check_tree(spans: Spans) -> None:
    """Check that the request has spans of all three services, under the gateway's root span."""
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
    # The first proposal follows the prompt, and later proposals follow a step.
    parents = {names[span.parent_span_id] for _, span in spans if span.name == "propose"}
    assert parents == {"generate_tokens", "verify"}


def check_trace(collector: Collector, line: dict[str, Any], usage: dict[str, Any]) -> None:
    """Check that the line's trace has the request's spans, in all services."""
    trace = bytes.fromhex(line["trace_id"])
    spans = [(service, span) for service, span in collector.spans if span.trace_id == trace]
    check_tree(spans)
    check_kinds(spans)
    ids = {span.name: attributes(span) for service, span in spans if "verify" not in span.name}
    assert ids[f"text_completion {TARGET}"]["gen_ai.response.id"].string_value == REQUEST_ID
    [served] = [
        attributes(span)
        for service, span in spans
        if (service, span.name) == ("outrider-verifier", "generate_tokens")
    ]
    assert served["outrider.request_id"].string_value == REQUEST_ID
    assert served["outrider.outcome"].string_value in ("stop", "length")
    assert served["gen_ai.usage.output_tokens"].int_value == usage["completion_tokens"]
    assert {"ngram-traced", "model-traced"} <= collector.instances


@contextmanager
def running() -> Iterator[tuple[Stack, GatewayProcess]]:
    """Yield a stack and its gateway. The verifier and the gateway log JSON."""
    stack = Stack("--always-draft", "--log-format", "json")
    stack.add_drafter("ngram-traced", "ngram")
    stack.add_drafter("model-traced", "model")
    # Each process sends its last spans when it stops.
    with behind_gateway(stack, "--log-format", "json") as gateway:
        yield stack, gateway


async def test_a_request_is_followed_by_its_id(monkeypatch: pytest.MonkeyPatch) -> None:
    async with collecting() as (collector, endpoint), AsyncExitStack() as exits:
        # The processes inherit this variable.
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        context = running()
        exits.push_async_callback(asyncio.to_thread, context.__exit__, None, None, None)
        stack, gateway = await asyncio.to_thread(context.__enter__)
        usage = await asked(gateway)
        await until(lambda: lines(gateway.output(), "gateway.access"))
        line = check_logs(gateway.output(), stack.verifier.output(), usage)
        await exits.aclose()
        check_trace(collector, line, usage)
