"""The spans of a request in the verifier: queue, prompt and steps, linked to their batches."""

from __future__ import annotations

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from outrider.process.observability import telemetry
from outrider.protocol.messages import SamplingParams, TokenRequest
from outrider.protocol.model_info import Placement
from tests.verifier.fake_model import Client, ScriptedDrafter, make_engine
from verifier_svc.engine.loop import Engine

REQUEST = TokenRequest([1, 2, 3], 5, SamplingParams(temperature=0.0), ignore_eos=True)


def generate(engine: Engine, traced: list[bool]) -> None:
    """Serve concurrent requests, one for each of `traced`: in a separate trace, or in none."""
    roots = []
    for wanted in traced:
        roots.append(telemetry.start_root("request", {}) if wanted else telemetry.NO_SPAN)
    for root in roots:
        engine.submit(REQUEST, Client(), root)
    while engine.sequences:
        engine.step()
    for root in roots:
        root.end()


def named(spans: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    """Return the finished spans with this name."""
    return [span for span in spans.get_finished_spans() if span.name == name]


def test_queue_prompt_and_steps_are_consecutive_children_of_the_request(
    spans: InMemorySpanExporter,
) -> None:
    engine, _ = make_engine(eos_bias=-99)
    generate(engine, [True])
    [root] = named(spans, "request")
    [queue] = named(spans, "queue")
    [prefill] = named(spans, "prefill")
    steps = named(spans, "verify")
    assert len(steps) == 5
    for span in (queue, prefill, *steps):
        assert span.parent is not None
        assert span.parent.span_id == root.context.span_id
    assert prefill.attributes == {"outrider.prompt_tokens": 3, "outrider.cached_tokens": 0}
    assert queue.end_time is not None
    assert prefill.start_time is not None
    # A busy machine may delay the prefill by seconds.
    assert abs(prefill.start_time - queue.end_time) < 5e9
    assert not named(spans, "step"), "the sequence's own span tells all of its step"


def test_a_batch_and_its_traced_sequences_are_linked_both_ways(
    spans: InMemorySpanExporter,
) -> None:
    engine, _ = make_engine(eos_bias=-99)
    generate(engine, [True, False, True])
    roots = {root.context.span_id: root for root in named(spans, "request")}
    batches = named(spans, "step")
    assert len(batches) == 5
    for batch in batches:
        assert {link.context.span_id for link in batch.links} == set(roots)
        assert batch.attributes is not None
        assert batch.attributes["outrider.sequences"] == 3
    batch_ids = {batch.context.span_id for batch in batches}
    verifications = named(spans, "verify")
    assert len(verifications) == 10
    for span in verifications:
        [link] = span.links
        assert link.context.span_id in batch_ids


def test_a_steps_span_has_its_drafter_and_the_accepted_tokens(
    spans: InMemorySpanExporter,
) -> None:
    engine, model = make_engine(eos_bias=-99)
    place = Placement("grace", "host", "cpu", (0, 1, 2), 1, "aarch64")
    drafter = ScriptedDrafter(engine, placement=place)
    sequence = engine.submit(REQUEST, Client(), telemetry.start_root("request", {}))
    engine.step()
    drafter.propose(sequence.id, model.greedy(sequence.tokens, 2))
    engine.step()
    [_, step] = named(spans, "verify")
    expected = {
        "outrider.drafter": "scripted",
        "outrider.family": "scripted",
        "outrider.placement": "grace",
        "outrider.architecture": "aarch64",
        "outrider.cores": 3,
        "outrider.numa_node": 1,
        "outrider.draft_tokens": 2,
        "outrider.draft_shape": "chain",
        "outrider.accepted_tokens": 2,
        "outrider.committed_tokens": 3,
        "outrider.base_length": 4,
        "outrider.wait_seconds": 0.0,
        "outrider.lookups": "scripted: late, 0 wasted",
    }
    assert expected.items() <= dict(step.attributes or {}).items()


def test_a_sum_over_spans_counts_the_phases_of_each_step_once(
    spans: InMemorySpanExporter,
) -> None:
    engine, _ = make_engine(eos_bias=-99)
    generate(engine, [True] * 3)
    phases = [
        f"outrider.{phase}_seconds" for phase in ("pack", "forward", "accept", "commit", "send")
    ]
    with_phases = [
        span for span in spans.get_finished_spans() if phases[0] in (span.attributes or {})
    ]
    assert len(with_phases) == 5
    for span in with_phases:
        attributes = dict(span.attributes or {})
        assert set(phases) <= set(attributes)
        assert "outrider.wait_seconds" in attributes
        assert span.end_time is not None
        assert span.start_time is not None
        forward_s = attributes["outrider.forward_seconds"]
        assert isinstance(forward_s, float)
        assert 0 < forward_s <= (span.end_time - span.start_time) / 1e9 + 0.001
