"""`outrider bench --only tracing`: what OpenTelemetry costs, off against a sampled share and against everything.

Stacks that differ in nothing else are measured in turn, in an order that alternates, and compared round by round: what the machine
does beside them then troubles both alike. The spans go to an OTLP receiver that counts them.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from statistics import median
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench.prompts import DEMO_PROMPTS
from bench.ways import Measure, Pair, Task, outrider_stack
from outrider.tokenizer import load_tokenizer

_BATCH = 8
_RATIOS = {"off": 0.0, "1 % of the requests": 0.01, "every request": 1.0}
_RESAMPLES = 2_000


async def measure(pair: Pair, rounds: int, tokens: int, console: Console) -> dict[str, Any]:
    """Throughput in tokens/s by share of traced requests, and its ratio to tracing off with a 95 % interval."""
    tokenizer = load_tokenizer(str(pair.target))
    prompts = [tokenizer.encode(prompt).ids for _, prompt in DEMO_PROMPTS]
    task = Task([prompts[i % len(prompts)] for i in range(4 * _BATCH)], _BATCH, tokens, 0.0)
    found: dict[str, list[float]] = {name: [] for name in _RATIOS}
    async with _receiver() as (servicer, endpoint), AsyncExitStack() as stack:
        ways: dict[str, Measure] = {}
        for name, ratio in _RATIOS.items():
            tracing: dict[str, Any] = {"otlp_endpoint": endpoint, "trace_sample_ratio": ratio} if ratio else {}
            way = await stack.enter_async_context(outrider_stack(pair, ["ngram"], pair.shared_threads, **tracing))
            ways[name] = way({})
        for round_number in track(range(1 + rounds), "tracing", console=console):
            for name in sorted(ways, reverse=round_number % 2 == 0):
                sample = await ways[name](task)
                if round_number:
                    found[name].append(sample.tokens_per_s)
    table = Table(
        title=f"{pair.name}: throughput with tracing, batch {_BATCH}, {rounds} rounds; {servicer.spans} spans were received"
    )
    for title in ("traced", "tokens/s, median", "to tracing off, paired", "95 % interval"):
        table.add_column(title, justify="left" if title == "traced" else "right")
    record: dict[str, Any] = {}
    for name, rates in found.items():
        ratios = [rate / off for rate, off in zip(rates, found["off"], strict=True)]
        low, high = _interval(ratios)
        table.add_row(name, f"{median(rates):.1f}", f"{median(ratios):.4f}", f"{low:.4f} to {high:.4f}")
        record[name] = {"tokens_per_s": rates, "ratio": median(ratios), "interval": [low, high]}
    console.print(table)
    return record


def _interval(values: list[float]) -> tuple[float, float]:
    """The percentile bootstrap's 95 % interval of the median."""
    generator = random.Random(0)
    medians = sorted(median(generator.choices(values, k=len(values))) for _ in range(_RESAMPLES))
    return medians[int(0.025 * _RESAMPLES)], medians[int(0.975 * _RESAMPLES)]


class _Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.spans = 0

    async def Export(self, request: Any, context: Any) -> Any:
        self.spans += sum(len(scope.spans) for resource in request.resource_spans for scope in resource.scope_spans)
        return trace_service_pb2.ExportTraceServiceResponse()


@asynccontextmanager
async def _receiver() -> AsyncIterator[tuple[_Receiver, str]]:
    """Takes spans and counts them, in this process, which does little else while a stack is measured."""
    server, servicer = grpc.aio.server(), _Receiver()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]  # as generated
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield servicer, f"http://127.0.0.1:{port}"
    finally:
        await server.stop(0)
