"""Where the time of a step went, from the spans that a collector receives."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from outrider_bench.experiment.spans import Spans, overlap_s

_YEAR_S = 4e9  # after whatever `clear` was called at


def _span(name: str, trace: bytes, began: float, ended: float, **seconds: float) -> Span:
    span = Span(name=name, trace_id=trace)
    span.start_time_unix_nano, span.end_time_unix_nano = (
        round((_YEAR_S + began) * 1e9),
        round((_YEAR_S + ended) * 1e9),
    )
    for key, value in seconds.items():
        span.attributes.add(key=f"outrider.{key}_seconds").value.double_value = value
    return span


async def _received(*spans: Span) -> dict[str, float]:
    request = ExportTraceServiceRequest()
    request.resource_spans.add().scope_spans.add().spans.extend(spans)
    receiver = Spans()
    receiver.clear()
    context: Any = None
    await receiver.Export(request, context)
    return await receiver.split()


async def test_a_wait_is_computing_while_a_drafter_computes_else_network() -> None:
    split = await _received(
        _span("verify", b"a", 10.0, 10.4, wait=1.0, forward=0.3, accept=0.1),
        _span("propose", b"a", 9.5, 9.9),
        _span("propose", b"b", 9.0, 10.0),
    )
    assert split["wait_compute"] == pytest.approx(0.4, abs=1e-5)
    assert split["wait_network"] == pytest.approx(0.6, abs=1e-5)
    assert split["forward"] == pytest.approx(0.3)
    assert split["accept"] == pytest.approx(0.1)


async def test_a_batch_counts_once_and_drafters_of_all_its_sequences_count() -> None:
    step = _span("step", b"a", 10.0, 10.4, wait=1.0, forward=0.3)
    step.links.add(trace_id=b"b")
    split = await _received(
        step,
        _span("verify", b"a", 10.0, 10.4, wait=1.0),
        _span("verify", b"b", 10.0, 10.4, wait=1.0),
        _span("propose", b"b", 9.8, 10.2),
    )
    assert split["forward"] == pytest.approx(0.3)
    assert split["wait_compute"] == pytest.approx(0.2, abs=1e-5)
    assert split["wait_network"] == pytest.approx(0.8, abs=1e-5)


async def test_steps_from_before_do_not_count_when_their_spans_come_late() -> None:
    assert await _received(_span("verify", b"a", -_YEAR_S + 5.0, -_YEAR_S + 6.0, forward=1.0)) == {}


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=6),
    st.integers(0, 25),
    st.integers(25, 50),
)
def test_an_overlap_counts_every_moment_once(
    pairs: list[tuple[int, int]], began: int, ended: int
) -> None:
    intervals = [(float(min(pair)), float(max(pair))) for pair in pairs]
    covered = {
        at for low, high in intervals for at in range(int(low), int(high)) if began <= at < ended
    }
    assert overlap_s((float(began), float(ended)), intervals) == len(covered)
