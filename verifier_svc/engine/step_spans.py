"""The engine's spans: the queue, the prompt and the steps of each traced request.

If a step's batch has several sequences, each request's span of the step is linked to the span of
the batch.
"""

from __future__ import annotations

from collections.abc import Mapping

from outrider.process.clock import Clock
from outrider.process.observability import telemetry
from outrider.process.observability.telemetry import NO_SPAN, Span
from verifier_svc.metrics import VerifierMetrics
from verifier_svc.state.scheduled_sequence import ScheduledSequence
from verifier_svc.state.sequence import Sequence


class StepSpans:
    """Records an engine's spans, on its thread. Drafters' spans are children of steps' spans."""

    def __init__(self, metrics: VerifierMetrics, clock: Clock) -> None:
        self._metrics = metrics
        self._clock = clock
        self._open: list[Span] = []

    def begin(self, batch: list[ScheduledSequence], wait_s: float) -> list[Span]:
        """Begin a step, `wait_s` after it could have begun; return a span for each sequence.

        A sequence that is not traced gets `NO_SPAN`. A batch of several sequences has a span of its
        own, if one of them is traced.
        """
        for scheduled in batch:
            if scheduled.sequence.scheduled_at is None:
                self._scheduled(scheduled.sequence)
        parents = [scheduled.sequence.span.traceparent for scheduled in batch]
        traced = [parent for parent in parents if parent]
        if not traced:
            return [NO_SPAN] * len(batch)
        step = NO_SPAN
        if len(batch) > 1:
            step = telemetry.start("step", traced[0], links=traced, outrider__sequences=len(batch))
            step.set(outrider__wait_seconds=wait_s)
        spans = [_verify_span(scheduled, wait_s, step.traceparent) for scheduled in batch]
        self._open = [*spans, step]
        return spans

    @property
    def traceparent(self) -> str:
        """The traceparent of a span of the step, for the log; empty if the step has none."""
        return next((span.traceparent for span in self._open if span.traceparent), "")

    def end(self, phases_s: Mapping[str, float]) -> None:
        """End the step's spans; `phases_s` maps a phase of the step to its seconds.

        Only one span gets the phases, so that a sum over spans counts them once. The span with the
        phases is the span of the batch, or of the only sequence.
        """
        last = next((span for span in reversed(self._open) if span.traceparent), NO_SPAN)
        last.set(**{f"outrider__{phase}_seconds": seconds for phase, seconds in phases_s.items()})
        for span in self._open:
            span.end()
        self._open.clear()

    def _scheduled(self, sequence: Sequence) -> None:
        """Record that a sequence left the queue."""
        now = self._clock()
        sequence.scheduled_at = now
        queued_s = max(now - sequence.submitted_at, 0.0)
        self._metrics.queued(queued_s)
        telemetry.start("queue", sequence.span.traceparent, seconds_ago=queued_s).end()

    def prefilled(self, sequence: Sequence) -> None:
        """Record that a sequence's first token was committed."""
        began = sequence.scheduled_at
        if began is None:
            began = sequence.submitted_at
        seconds = max(self._clock() - began, 0.0)
        self._metrics.prefilled(seconds)
        telemetry.start(
            "prefill",
            sequence.span.traceparent,
            seconds_ago=seconds,
            outrider__prompt_tokens=len(sequence.request.prompt),
            outrider__cached_tokens=sequence.cached_token_count,
        ).end()


def _verify_span(scheduled: ScheduledSequence, wait_s: float, step: str) -> Span:
    """Return a sequence's span of the step, in its request's trace; `NO_SPAN` without a trace.

    The drafters' spans of the next round are children of this span. `step` is the traceparent of
    the batch's span.
    """
    if not scheduled.sequence.span.traceparent:
        return NO_SPAN
    # The step's verdict goes to drafters, whose spans then have the kind CONSUMER.
    parent = scheduled.sequence.span.traceparent
    span = telemetry.start("verify", parent, links=[step], kind=telemetry.Kind.PRODUCER)
    span.set(
        outrider__sequence_id=scheduled.sequence.id,
        outrider__tokens=len(scheduled.token_ids),
        outrider__draft_tokens=len(scheduled.draft.token_ids),
        outrider__planned_draft_tokens=scheduled.planned_draft_tokens,
        outrider__wait_seconds=wait_s,
    )
    if scheduled.assignment is not None:
        hello = scheduled.assignment.drafter.hello
        place = hello.placement
        span.set(
            outrider__drafter=hello.drafter_id,
            outrider__family=hello.family,
            outrider__placement=place.kind,
            outrider__architecture=place.architecture,
            outrider__cores=len(place.cores),
            outrider__base_length=len(scheduled.sequence.tokens),
            outrider__draft_shape="tree" if scheduled.draft.parents else "chain",
        )
        if place.numa_node is not None:
            span.set(outrider__numa_node=place.numa_node)
    return span
