"""`outrider bench --only tracing`: the cost of OpenTelemetry.

Two stacks have tracing off; their difference is the error of such a comparison. In a third, callers
say which requests are sampled. Each round measures all of them in random order, and ratios are
taken within rounds, so that other load on the machine meets all alike. The spans go to an OTLP
receiver that counts them.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from statistics import median
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from rich.console import Console
from rich.progress import track

from outrider.launch.prompts import DEMO_PROMPTS
from outrider.tokenizer import load_tokenizer
from outrider_bench.console import table_of
from outrider_bench.ways import MakeWay, Measure, Pair, Task, outrider_stack

_BATCH = 8
_OFF, _NOTHING = "off", "on, no request"
_COMPARED = {
    _OFF: _OFF,
    "off, another stack": _OFF,
    _NOTHING: _OFF,
    "on, 1 % of the requests": _NOTHING,
    "on, every request": _NOTHING,
}
_RESAMPLES = 2_000


async def measure(pair: Pair, rounds: int, tokens: int, console: Console) -> dict[str, Any]:
    """Measure tokens/s by share of traced requests, and ratios within rounds.

    Ratios have 95 % intervals.
    """
    tokenizer = load_tokenizer(str(pair.target))
    prompts = [tokenizer.encode(prompt).ids for _, prompt in DEMO_PROMPTS]
    task = Task([prompts[i % len(prompts)] for i in range(4 * _BATCH)], _BATCH, tokens, 0.0)
    generator = random.Random(0)
    async with _receiver() as (servicer, endpoint), AsyncExitStack() as stack:
        ways = await _ways(stack, pair, endpoint, generator)
        found: dict[str, list[float]] = {name: [] for name in ways}
        for round_number in track(range(1 + rounds), "tracing", console=console):
            for name in generator.sample(list(ways), len(ways)):
                sample = await ways[name](task)
                if round_number:
                    found[name].append(sample.tokens_per_s)
    console.print(
        f"{pair.name}, batch {_BATCH}, {rounds} rounds; {servicer.spans} spans were received"
    )
    columns = ("traced", "tokens/s, median", "compared with", "ratio, paired", "95 % interval")
    table = table_of("throughput with tracing", columns, text=["compared with"])
    record: dict[str, Any] = {}
    for name, rates in found.items():
        base = _COMPARED[name]
        ratios = [rate / other for rate, other in zip(rates, found[base], strict=True)]
        low, high = _interval(ratios)
        table.add_row(
            name, f"{median(rates):.1f}", base, f"{median(ratios):.4f}", f"{low:.4f} to {high:.4f}"
        )
        record[name] = {
            "tokens_per_s": rates,
            "compared_with": base,
            "ratio": median(ratios),
            "interval": [low, high],
        }
    console.print(table)
    return record


async def _ways(
    stack: AsyncExitStack, pair: Pair, endpoint: str, generator: random.Random
) -> dict[str, Measure]:
    """Start the compared stacks; returns their ways of decoding.

    The number of draft tokens is fixed, because a policy would learn differently in each stack.
    """

    async def start(**tracing: str) -> MakeWay:
        """Start a stack with an n-gram drafter and these settings of tracing."""
        return await stack.enter_async_context(
            outrider_stack(pair, ["ngram"], pair.shared_threads, draft_tokens="fixed:4", **tracing)
        )

    def sampled(share: float) -> Callable[[], dict[str, str]]:
        """Return a function that makes a request's headers, with this share of traces sampled."""

        def headers() -> dict[str, str]:
            flag = "00"
            if generator.random() < share:
                flag = "01"
            trace_id = generator.getrandbits(128)
            span_id = generator.getrandbits(64)
            return {"traceparent": f"00-{trace_id:032x}-{span_id:016x}-{flag}"}

        return headers

    off, again, on = await start(), await start(), await start(otlp_endpoint=endpoint)
    shares = {_NOTHING: 0.0, "on, 1 % of the requests": 0.01, "on, every request": 1.0}
    return {
        _OFF: off({}),
        "off, another stack": again({}),
        **{name: on({}, sampled(share)) for name, share in shares.items()},
    }


def _interval(values: list[float]) -> tuple[float, float]:
    """The percentile bootstrap's 95 % interval of the median."""
    generator = random.Random(0)
    medians = sorted(median(generator.choices(values, k=len(values))) for _ in range(_RESAMPLES))
    return medians[int(0.025 * _RESAMPLES)], medians[int(0.975 * _RESAMPLES)]


class _Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.spans = 0

    async def Export(self, request: Any, context: Any) -> Any:
        """Count the spans of an export and drop them."""
        self.spans += sum(
            len(scope.spans)
            for resource in request.resource_spans
            for scope in resource.scope_spans
        )
        return trace_service_pb2.ExportTraceServiceResponse()


@asynccontextmanager
async def _receiver() -> AsyncIterator[tuple[_Receiver, str]]:
    """Receive spans and count them.

    It runs in this process, which does little else while a stack is measured.
    """
    server, servicer = grpc.aio.server(), _Receiver()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]  # as generated
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield servicer, f"http://127.0.0.1:{port}"
    finally:
        await server.stop(0)
