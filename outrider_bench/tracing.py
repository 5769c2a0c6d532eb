"""`outrider bench --only tracing`: the cost of OpenTelemetry.

Two stacks have tracing off; their difference is the error of such a comparison. In a third, callers
say which requests are sampled. The spans go to an OTLP receiver that counts them.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from rich.console import Console

from outrider_bench.paired import BATCH, compare, task_of
from outrider_bench.ways import MakeWay, Measure, Pair, outrider_stack

_OFF, _NOTHING = "off", "on, no request"
_COMPARED = {
    _OFF: _OFF,
    "off, another stack": _OFF,
    _NOTHING: _OFF,
    "on, 1 % of the requests": _NOTHING,
    "on, every request": _NOTHING,
}


async def measure(pair: Pair, rounds: int, tokens: int, console: Console) -> dict[str, Any]:
    """Measure tokens/s by share of traced requests, and ratios within rounds."""
    async with _receiver() as (servicer, endpoint), AsyncExitStack() as stack:
        ways = await _ways(stack, pair, endpoint, random.Random(0))
        task = task_of(pair, tokens)
        record = await compare(ways, _COMPARED, task, rounds, console, "tracing")
    console.print(
        f"{pair.name}, batch {BATCH}, {rounds} rounds; {servicer.spans} spans were received"
    )
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
