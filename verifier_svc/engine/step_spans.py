"""The engine's spans: how long a request queued, its prompt, and a share of its steps, linked to the batches they were part of."""

from __future__ import annotations

from collections.abc import Mapping

from outrider.clock import Clock
from outrider.process import telemetry
from outrider.process.telemetry import NO_SPAN, Span
from verifier_svc.metrics import Metrics
from verifier_svc.state.scheduled_sequence import ScheduledSequence
from verifier_svc.state.sequence import Sequence


class StepSpans:
    """For one engine, on its thread. `share` of the steps have spans, evenly spread; drafts are traced below those."""

    def __init__(self, metrics: Metrics, share: float, clock: Clock) -> None:
        self._metrics = metrics
        self._share = share
        self._clock = clock
        self._due = 0.0
        self._open: list[Span] = []

    def begin(self, batch: list[ScheduledSequence], wait_s: float) -> list[Span]:
        """A step begins: a span for each traced sequence in it, and one for the batch when there are several."""
        for scheduled in batch:
            if scheduled.sequence.scheduled_at is None:
                self._scheduled(scheduled.sequence)
        traced = [
            scheduled.sequence.span.traceparent
            for scheduled in batch
            if scheduled.sequence.span.traceparent
        ]
        self._due += self._share if traced else 0.0
        if not traced or self._due < 1.0:
            return [NO_SPAN] * len(batch)
        self._due -= 1.0
        step = NO_SPAN
        if len(batch) > 1:
            step = telemetry.start("step", traced[0], links=traced, outrider__sequences=len(batch))
            step.set(outrider__wait_seconds=wait_s)
        spans = [
            _verify(scheduled, wait_s, step.traceparent)
            if scheduled.sequence.span.traceparent
            else NO_SPAN
            for scheduled in batch
        ]
        self._open = [*spans, step]
        return spans

    @property
    def traceparent(self) -> str:
        """That of some span of the step, for the log; empty when the step has none."""
        return next((span.traceparent for span in self._open if span.traceparent), "")

    def end(self, phases_s: Mapping[str, float]) -> None:
        """The step is over; `phases_s` are the seconds of its phases by name.

        The span of the batch has them, or that of the sequence which is alone in it, so that a sum over spans counts each once.
        """
        with_phases = next((span for span in reversed(self._open) if span.traceparent), NO_SPAN)
        with_phases.set(
            **{f"outrider__{phase}_seconds": seconds for phase, seconds in phases_s.items()}
        )
        for span in self._open:
            span.end()
        self._open.clear()

    def _scheduled(self, sequence: Sequence) -> None:
        """A sequence left the queue."""
        sequence.scheduled_at = now = self._clock()
        queued_s = max(now - sequence.submitted_at, 0.0)
        self._metrics.queued(queued_s)
        telemetry.start("queue", sequence.span.traceparent, seconds_ago=queued_s).end()

    def prefilled(self, sequence: Sequence) -> None:
        """A sequence's first token is there."""
        began = sequence.submitted_at if sequence.scheduled_at is None else sequence.scheduled_at
        seconds = max(self._clock() - began, 0.0)
        self._metrics.prefilled(seconds)
        telemetry.start(
            "prefill",
            sequence.span.traceparent,
            seconds_ago=seconds,
            outrider__prompt_tokens=len(sequence.request.prompt),
            outrider__cached_tokens=sequence.cached_token_count,
        ).end()


def _verify(scheduled: ScheduledSequence, wait_s: float, step: str) -> Span:
    """The step's span in its request's trace; drafters of the next round stand below it."""
    span = telemetry.start("verify", scheduled.sequence.span.traceparent, links=[step])
    span.set(
        outrider__sequence_id=scheduled.sequence.id,
        outrider__tokens=len(scheduled.token_ids),
        outrider__draft_tokens=len(scheduled.path.token_ids),
        outrider__planned_draft_tokens=scheduled.planned_draft_tokens,
        outrider__wait_seconds=wait_s,
    )
    if scheduled.assignment is not None:
        hello = scheduled.assignment.drafter.hello
        span.set(
            outrider__drafter=hello.drafter_id,
            outrider__family=hello.family,
            outrider__placement=hello.placement.kind,
            outrider__base_length=len(scheduled.sequence.tokens),
        )
    return span
