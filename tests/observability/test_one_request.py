"""One request is found by its id in the access log, from there in the metrics and in its trace."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from outrider.process.network.ports import free_port
from tests.stack import TARGET, GatewayProcess, Stack, behind_gateway
from tests.trace_collector import Collector, attributes, collecting
from tests.waiting import until

pytestmark = pytest.mark.slow

REQUEST_ID = "complaint-7"


def lines(output: str, logger: str) -> list[dict[str, Any]]:
    """The records of a logger among a process's output, for the request."""
    records = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return [
        record
        for record in records
        if record["logger"] == logger and record["request_id"] == REQUEST_ID
    ]


def sample(text: str, name: str, **labels: str) -> float:
    """The value of a series in Prometheus' format."""
    # The parser reads Prometheus' names with colons.
    found = [
        each.value
        for family in text_string_to_metric_families(text)
        for each in family.samples
        if each.name == name and labels.items() <= each.labels.items()
    ]
    [value] = found
    return value


async def asked(gateway: GatewayProcess) -> dict[str, Any]:
    """The answer's usage and error."""
    headers = {"x-request-id": REQUEST_ID, "authorization": "Bearer somebody"}
    body = {"prompt": "def read(path):\n    ", "max_tokens": 32, "temperature": 0}
    async with httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=60) as client:
        answer = await client.post("/v1/completions", json=body)
        assert answer.json()["id"] == answer.headers["x-request-id"] == REQUEST_ID
        return answer.json()["usage"]


def check_logs(gateway: str, verifier: str, usage: dict[str, Any]) -> dict[str, Any]:
    """The gateway's line, which agrees with the verifier's and with the answer."""
    [line] = lines(gateway, "gateway.access")
    [served] = lines(verifier, "verifier.access")
    assert line["status"] == "200"
    assert line["tenant"] == served["tenant"] != ""
    assert line["trace_id"] == served["trace_id"]
    for each in (line, served):
        assert each["prompt_tokens"] == usage["prompt_tokens"]
        assert each["completion_tokens"] == usage["completion_tokens"]
    return line


def check_trace(collector: Collector, line: dict[str, Any], usage: dict[str, Any]) -> None:
    """The spans of the line's trace are those of the request, in all services."""
    trace = bytes.fromhex(line["trace_id"])
    spans = [(service, span) for service, span in collector.spans if span.trace_id == trace]
    assert {service.removeprefix("outrider-") for service, _ in spans} == {
        "gateway",
        "verifier",
        "drafter",
    }
    ids = {span.name: attributes(span) for service, span in spans if "verify" not in span.name}
    assert ids[f"text_completion {TARGET}"]["gen_ai.response.id"].string_value == REQUEST_ID
    [served] = [
        attributes(span)
        for service, span in spans
        if (service, span.name) == ("outrider-verifier", "generate_tokens")
    ]
    assert served["outrider.request_id"].string_value == REQUEST_ID
    assert served["gen_ai.usage.output_tokens"].int_value == usage["completion_tokens"]


def check_metrics(gateway: str, verifier: str, line: dict[str, Any]) -> None:
    """The metrics of both processes have counted what the line says, and nothing else."""
    route = {"route": line["path"], "status": line["status"]}
    assert sample(gateway, "outrider:http_responses_total", **route) == 1
    for text in (gateway, verifier):
        tokens = sample(text, "outrider:generation_tokens_total", model_name=line["model"])
        assert tokens == line["completion_tokens"]
    seconds = sample(gateway, "outrider:e2e_request_latency_seconds_sum")
    assert 0 < seconds <= line["duration_seconds"]


@contextmanager
def running() -> Iterator[tuple[Stack, GatewayProcess, str]]:
    """A stack with its gateway, which log JSON, and the URL of the verifier's metrics."""
    port = free_port()
    stack = Stack("--always-draft", "--log-format", "json", "--metrics-port", str(port))
    stack.add_drafter("n", "ngram")
    # Each process sends its last spans when it stops.
    with behind_gateway(stack, "--log-format", "json") as gateway:
        yield stack, gateway, f"http://127.0.0.1:{port}/metrics"


async def test_a_request_is_followed_by_its_id(monkeypatch: pytest.MonkeyPatch) -> None:
    async with collecting() as (collector, endpoint), AsyncExitStack() as exits:
        # The processes inherit it.
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        context = running()
        exits.push_async_callback(asyncio.to_thread, context.__exit__, None, None, None)
        stack, gateway, metrics = await asyncio.to_thread(context.__enter__)
        usage = await asked(gateway)
        await until(lambda: lines(gateway.output(), "gateway.access"))
        line = check_logs(gateway.output(), stack.verifier.output(), usage)
        async with httpx.AsyncClient(timeout=60) as client:
            own = (await client.get(f"{gateway.url}/metrics")).text
            theirs = (await client.get(metrics)).text
        check_metrics(own, theirs, line)
        await exits.aclose()
        check_trace(collector, line, usage)
