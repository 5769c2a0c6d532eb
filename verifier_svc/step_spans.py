"""The engine's spans: how long a request queued, its prompt, and a share of its steps, linked to the batches they were part of."""

from __future__ import annotations

from outrider import telemetry
from outrider.clock import Clock
from outrider.telemetry import NO_SPAN, Span
from verifier_svc.metrics import Metrics
from verifier_svc.scheduler import Item
from verifier_svc.sequence import Sequence


class StepSpans:
    """For one engine, on its thread. `share` of the steps have spans, evenly spread; drafts are traced below those."""

    def __init__(self, metrics: Metrics, share: float, clock: Clock) -> None:
        self._metrics = metrics
        self._share = share
        self._clock = clock
        self._due = 0.0
        self._open: list[Span] = []

    def begin(self, items: list[Item], wait_s: float) -> list[Span]:
        """A step begins: a span for each traced sequence in it, and one for the batch when there are several."""
        for item in items:
            if item.sequence.scheduled_at == 0.0:
                self._scheduled(item.sequence)
        traced = [item.sequence.span.traceparent for item in items if item.sequence.span.traceparent]
        self._due += self._share if traced else 0.0
        if not traced or self._due < 1.0:
            return [NO_SPAN] * len(items)
        self._due -= 1.0
        several = len(items) > 1
        batch = telemetry.start("step", traced[0], links=traced, outrider__sequences=len(items)) if several else NO_SPAN
        spans = [_verify(item, wait_s, batch.traceparent) if item.sequence.span.traceparent else NO_SPAN for item in items]
        self._open = [*spans, batch]
        return spans

    def end(self) -> None:
        """The step is over."""
        for span in self._open:
            span.end()
        self._open.clear()

    def _scheduled(self, sequence: Sequence) -> None:
        """A sequence left the queue."""
        sequence.scheduled_at = self._clock()
        queued_s = max(sequence.scheduled_at - sequence.submitted_at, 0.0)
        self._metrics.queued(queued_s)
        telemetry.start("queue", sequence.span.traceparent, seconds_ago=queued_s).end()

    def prefilled(self, sequence: Sequence) -> None:
        """A sequence's first token is there."""
        seconds = max(self._clock() - sequence.scheduled_at, 0.0)
        self._metrics.prefilled(seconds)
        telemetry.start(
            "prefill",
            sequence.span.traceparent,
            seconds_ago=seconds,
            outrider__prompt_tokens=len(sequence.request.prompt),
            outrider__cached_tokens=sequence.cached_token_count,
        ).end()


def _verify(item: Item, wait_s: float, batch: str) -> Span:
    """The step's span in its request's trace; drafters of the next round stand below it."""
    span = telemetry.start("verify", item.sequence.span.traceparent, links=[batch])
    span.set(
        outrider__sequence_id=item.sequence.id,
        outrider__tokens=len(item.token_ids),
        outrider__draft_tokens=len(item.path.token_ids),
        outrider__depth=item.sequence.depth,
        outrider__wait_seconds=wait_s,
    )
    if item.assignment is not None:
        hello = item.assignment.drafter.hello
        span.set(
            outrider__drafter=hello.drafter_id,
            outrider__family=hello.family,
            outrider__placement=hello.placement.kind,
            outrider__committed_length=len(item.sequence.tokens),
        )
    return span
