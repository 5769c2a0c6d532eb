"""Receives OpenTelemetry spans over OTLP, and adds up the time of the verifier's steps by phase.

docs/observability.md lists the spans and attributes.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

PHASES = ("pack", "forward", "accept", "commit", "send")
_SETTLE_S = 1.0
_Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class _Step:
    """A step of a verifier, with the traces of its sequences and its beginning in seconds."""

    traces: frozenset[bytes]
    began: float
    wait_s: float
    phases_s: Mapping[str, float]


class Spans(trace_service_pb2_grpc.TraceServiceServicer):
    """An OTLP receiver. Processes send their spans to `endpoint`."""

    def __init__(self) -> None:
        self.endpoint = ""
        self._since = 0.0
        self._steps: list[_Step] = []
        self._proposals: dict[bytes, list[_Interval]] = defaultdict(list)
        """The times in which drafters computed, by trace, in seconds."""

    async def Export(self, request: Any, context: Any) -> Any:
        """Take an export of OTLP: the spans of any number of resources and scopes."""
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self._take(span)
        return trace_service_pb2.ExportTraceServiceResponse()

    def clear(self) -> None:
        """Forget all steps that began before now, also if their spans come later."""
        self._since = time.time()
        self._steps.clear()
        self._proposals.clear()

    async def split(self) -> dict[str, float]:
        """Seconds by phase of all steps since `clear`; empty without steps.

        Waits a second for the last spans. In the wait before a step, the time in which a drafter
        computed for one of its sequences is `wait_compute`, the rest is `wait_network`. Machines
        need clocks that agree.
        """
        await asyncio.sleep(_SETTLE_S)
        steps = [step for step in self._steps if step.began >= self._since]
        if not steps:
            return {}
        found = dict.fromkeys((*PHASES, "wait_compute", "wait_network"), 0.0)
        for step in steps:
            for phase in PHASES:
                found[phase] += step.phases_s.get(phase, 0.0)
            drafting = (
                interval for trace in step.traces for interval in self._proposals.get(trace, ())
            )
            computing_s = overlap_s((step.began - step.wait_s, step.began), drafting)
            found["wait_compute"] += computing_s
            found["wait_network"] += step.wait_s - computing_s
        return found

    def _take(self, span: Any) -> None:
        if span.name == "propose":
            began_ended = span.start_time_unix_nano / 1e9, span.end_time_unix_nano / 1e9
            self._proposals[span.trace_id].append(began_ended)
        elif span.name in ("step", "verify"):
            seconds = {
                pair.key: pair.value.double_value
                for pair in span.attributes
                if pair.key.endswith("_seconds")
            }
            phases_s = {phase: seconds.get(f"outrider.{phase}_seconds", 0.0) for phase in PHASES}
            if not any(phases_s.values()):
                return  # a sequence's span; the span of the batch has the phases
            traces = frozenset([span.trace_id, *(link.trace_id for link in span.links)])
            wait_s = seconds.get("outrider.wait_seconds", 0.0)
            self._steps.append(_Step(traces, span.start_time_unix_nano / 1e9, wait_s, phases_s))


def overlap_s(within: _Interval, intervals: Iterable[_Interval]) -> float:
    """Seconds of `within` that the intervals cover. Intervals may overlap."""
    covered = 0.0
    reached = within[0]
    for began, ended in sorted(intervals):
        ended = min(ended, within[1])
        if ended > reached and began < within[1]:
            covered += ended - max(began, reached)
            reached = ended
    return covered


@asynccontextmanager
async def receiver(address: str) -> AsyncIterator[Spans]:
    """Receive spans in this process, on an IP address of this machine."""
    server = grpc.aio.server()
    spans = Spans()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(spans, server)  # type: ignore[no-untyped-call]  # as generated
    port = server.add_insecure_port(f"{address}:0")
    spans.endpoint = f"http://{address}:{port}"
    await server.start()
    try:
        yield spans
    finally:
        await server.stop(0)
