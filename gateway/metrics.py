"""The gateway's Prometheus metrics.

Metrics that vLLM has too have vLLM's names and definitions, under the prefix `outrider:`. Counters
of drafts keep vLLM's own prefix, since `vllm bench serve` reads them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
)

from outrider.errors import Reason
from outrider.protocol.messages import FinishReason, TokenChunk, TokenSource

# As in the other processes, nobody needs a time series with each counter's creation time.
disable_created_metrics()  # type: ignore[no-untyped-call]  # has no types

_LABELS = ["model_name"]
_SEMANTIC_LABELS = ["gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model"]
PROVIDER = "outrider"
# Bounds of histograms, in seconds.
_FIRST_TOKEN_S = [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0]
_FIRST_TOKEN_S += [7.5, 10.0, 20.0, 40.0, 80.0]
# OpenTelemetry's own bounds begin at 10 ms. With speculation, tokens come faster.
_TOKEN_S = [0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025]
_TOKEN_S += [0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0]
_REQUEST_S = [0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0]
_REQUEST_S += [60.0, 120.0, 240.0, 480.0]
_LAG_S = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0]
_LAG_EVERY_S = 0.02


async def observe_lag(lag_s: Histogram) -> None:
    """Keep observing how many seconds too late the event loop wakes a task that sleeps 20 ms."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + _LAG_EVERY_S
        await asyncio.sleep(_LAG_EVERY_S)
        lag_s.observe(max(0.0, loop.time() - due))


@dataclass(slots=True)
class Activity:
    """Sums since the gateway started. A reader subtracts two snapshots to get rates."""

    tokens: dict[str, int] = field(
        default_factory=lambda: {source.name.lower(): 0 for source in TokenSource}
    )
    draft_tokens: int = 0
    """Draft tokens verified."""
    accepted_counts: list[int] = field(default_factory=list)
    """Entry i counts the steps that verified a draft and accepted i of its tokens."""
    chain_steps: int = 0
    """Steps of a sequence that verified a chain of draft tokens."""
    chain_tokens: int = 0
    """The number of tokens that chain steps committed."""
    tree_steps: int = 0
    """Steps of a sequence that verified draft tokens with branches."""
    tree_tokens: int = 0
    """The number of tokens that tree steps committed."""
    side_draft_tokens: int = 0
    """Verified draft tokens beside the main paths."""
    later_tokens: int = 0
    """The number of tokens after the first chunk of their sequence."""
    later_token_seconds: float = 0.0
    """The time that `later_tokens` took, summed over sequences."""

    def add(self, chunk: TokenChunk) -> None:
        """Count a chunk's tokens by source, and the draft tokens that its step verified."""
        for source in chunk.sources:
            self.tokens[source.name.lower()] += 1
        self.draft_tokens += chunk.draft_token_count
        self.side_draft_tokens += chunk.side_draft_token_count

    def add_step(self, chunk: TokenChunk) -> None:
        """Count a chunk of one step that verified a draft, under the draft's shape."""
        if chunk.side_draft_token_count:
            self.tree_steps += 1
            self.tree_tokens += len(chunk.token_ids)
        else:
            self.chain_steps += 1
            self.chain_tokens += len(chunk.token_ids)

    def waited(self, token_count: int, seconds: float) -> None:
        """Record that a sequence got `token_count` tokens `seconds` after its previous tokens."""
        self.later_tokens += token_count
        self.later_token_seconds += seconds

    def snapshot(self) -> dict[str, Any]:
        """Return the sums, keyed by name, as JSON has them."""
        return asdict(self)


def add_counts(sums: list[int], counts: Sequence[int]) -> None:
    """Add `counts` to `sums` entry by entry, in place. `sums` grows as needed."""
    sums += [0] * (len(counts) - len(sums))
    for index, count in enumerate(counts):
        sums[index] += count


class GatewayMetrics:
    """The metrics of one gateway, in their own registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.activity = Activity()
        """Sums over all tenants."""
        self.by_tenant: dict[str, Activity] | None = None
        """Sums over each tenant's sequences. None without API keys, since nothing else bounds the
        number of tenants.
        """
        self._add_counters()
        self._add_times()
        self._add_draft_counters()
        self.http_responses = Counter(
            "outrider:http_responses",
            "HTTP responses.",
            ["route", "status"],
            registry=self.registry,
        )
        self.grpc_responses = Counter(
            "outrider:grpc_responses",
            "Ends of gRPC calls.",
            ["method", "status"],
            registry=self.registry,
        )

    def activity_of(self, tenant: str) -> Activity:
        """Return the sums over a tenant's sequences."""
        by_tenant = {} if self.by_tenant is None else self.by_tenant
        return by_tenant.setdefault(tenant, Activity())

    def _add_counters(self) -> None:
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts.")
        self.generation_tokens = self._counter("generation_tokens", "Generated tokens.")
        self.finished = self._counter(
            "request_success", "Sequences that finished without an error.", "finished_reason"
        )
        self.failed = self._counter(
            "request_failure", "Sequences that ended in an error.", "reason"
        )
        self.resumed = self._counter(
            "request_resumed", "Times that a sequence went on at another verifier.", "reason"
        )
        self.refused = self._counter(
            "request_refused",
            "Requests that the gateway refused at once, for lack of room or time.",
        )
        self.cancelled = self._counter("request_cancelled", "Sequences whose client hung up.")
        self.differing = Gauge(
            "outrider:differing_models",
            "Models whose ready verifiers differ in weights, dtype, version or settings.",
            registry=self.registry,
        )
        self.unresolved = Counter(
            "outrider:resolution_failures",
            "Times that a name of verifiers could not be resolved.",
            ["name"],
            registry=self.registry,
        )
        self.degraded = Gauge(
            "outrider:degraded",
            "1 if requests are taken while a verifier or a drafter is missing, else 0.",
            registry=self.registry,
        )
        self.drafters_lost = Gauge(
            "outrider:drafters_lost",
            "Drafters that vanished in the last ten minutes, of all verifiers.",
            registry=self.registry,
        )
        self.running = Gauge(
            "outrider:num_requests_running",
            "Sequences in progress.",
            _LABELS,
            registry=self.registry,
        )
        self.unread = Gauge(
            "outrider:num_requests_unread",
            "Sequences in progress that wait for their client to read.",
            _LABELS,
            registry=self.registry,
        )

    def _add_times(self) -> None:
        self.first_token_s = self._histogram(
            "time_to_first_token_seconds",
            "Time from the request to its first token.",
            _FIRST_TOKEN_S,
        )
        self.chunk_s = self._histogram(
            "inter_token_latency_seconds", "Time between two outputs of a sequence.", _TOKEN_S
        )
        self.token_s = self._histogram(
            "request_time_per_output_token_seconds",
            "Time from first to last token, divided by the number of tokens after the first.",
            _TOKEN_S,
        )
        self.request_s = self._histogram(
            "e2e_request_latency_seconds", "Time from the request to its end.", _REQUEST_S
        )
        self.semantic_first_token_s = self._semantic(
            "time_to_first_token", "Time to generate the first token.", _FIRST_TOKEN_S
        )
        self.semantic_token_s = self._semantic(
            "time_per_output_token", "Time per output token after the first.", _TOKEN_S
        )
        self.semantic_request_s = self._semantic(
            "request_duration", "Time of a request.", _REQUEST_S, "error_type"
        )
        self.loop_lag_s = Histogram(
            "outrider:event_loop_lag_seconds",
            "How late the event loop wakes a sleeping task.",
            buckets=_LAG_S,
            registry=self.registry,
        )

    def _add_draft_counters(self) -> None:
        self.drafts = self._vllm("num_drafts", "Steps of a sequence that verified a draft.")
        self.draft_tokens = self._vllm("num_draft_tokens", "Draft tokens verified.")
        self.accepted_tokens = self._vllm("num_accepted_tokens", "Draft tokens accepted.")
        self.accepted_per_position = self._vllm(
            "num_accepted_tokens_per_pos",
            "Draft tokens accepted, by position in the draft.",
            "position",
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"outrider:{name}", text, [*_LABELS, *labels], registry=self.registry)

    def _vllm(self, name: str, text: str, *labels: str) -> Counter:
        """Return one of vLLM's counters of speculative decoding, under vLLM's name."""
        return Counter(
            f"vllm:spec_decode_{name}", text, [*_LABELS, *labels], registry=self.registry
        )

    def begin(self, model: str) -> None:
        """Export a model's counters of errors as 0, so that their first increase can be seen."""
        self.refused.labels(model)
        self.cancelled.labels(model)
        for reason in Reason:
            if reason.kind.http >= 500:
                self.failed.labels(model, reason.name.lower())

    def drafted(self, model: str, draft_token_count: int, accepted_counts: Sequence[int]) -> None:
        """Count the drafts of a finished sequence.

        `accepted_counts[i]` of its steps verified a draft and accepted i of the draft's tokens.
        """
        self.drafts.labels(model).inc(sum(accepted_counts))
        self.draft_tokens.labels(model).inc(draft_token_count)
        self.accepted_tokens.labels(model).inc(
            sum(i * count for i, count in enumerate(accepted_counts))
        )
        for position in range(len(accepted_counts) - 1):
            self.accepted_per_position.labels(model, str(position)).inc(
                sum(accepted_counts[position + 1 :])
            )

    def _semantic(self, name: str, text: str, buckets: list[float], *labels: str) -> Histogram:
        """Return a metric of OpenTelemetry's semantic conventions for generative AI."""
        return Histogram(
            f"gen_ai_server_{name}_seconds",
            text,
            [*_SEMANTIC_LABELS, *labels],
            buckets=buckets,
            registry=self.registry,
        )

    def _histogram(self, name: str, text: str, buckets: list[float]) -> Histogram:
        return Histogram(f"outrider:{name}", text, _LABELS, buckets=buckets, registry=self.registry)


class SequenceClock:
    """Records the metrics of one sequence, from its creation until `close`."""

    def __init__(
        self,
        metrics: GatewayMetrics,
        model: str,
        operation: str,
        prompt_token_count: int,
        tenant: str = "",
    ) -> None:
        self._metrics = metrics
        self._model = model
        self._start = self._first = self._last = time.perf_counter()
        self._semantic = (operation, PROVIDER, model)
        self._token_count = 0
        self._ended = False
        self._draft_token_count = 0
        self._accepted_counts: list[int] = []
        self._activities = [metrics.activity]
        if metrics.by_tenant is not None:
            self._activities.append(metrics.activity_of(tenant))
        self._chunk_s = metrics.chunk_s.labels(model)
        metrics.prompt_tokens.labels(model).inc(prompt_token_count)
        metrics.running.labels(model).inc()

    def add(self, chunk: TokenChunk, *, coalesced: bool) -> None:
        """Record a chunk.

        `coalesced` means that a chunk may hold several steps. With such chunks, only the statistics
        of the last chunk say how many tokens each step accepted.
        """
        if chunk.token_ids:
            self._add_tokens(len(chunk.token_ids))
        for activity in self._activities:
            activity.add(chunk)
        if not coalesced:
            self._draft_token_count += chunk.draft_token_count
        elif chunk.stats is not None:
            # A lost verifier's statistics never come, so neither its drafts nor its steps count.
            self._draft_token_count += chunk.stats.draft_token_count
        if coalesced and chunk.stats is not None:
            self._add_accepted(chunk.stats.histogram)
        elif not coalesced and chunk.draft_token_count:
            self._add_accepted([0] * chunk.accepted_count + [1])
            for activity in self._activities:
                activity.add_step(chunk)

    def _add_accepted(self, accepted_counts: Sequence[int]) -> None:
        add_counts(self._accepted_counts, accepted_counts)
        for activity in self._activities:
            add_counts(activity.accepted_counts, accepted_counts)

    def _add_tokens(self, token_count: int) -> None:
        now = time.perf_counter()
        if self._token_count == 0:
            self._first = now
            self._metrics.first_token_s.labels(self._model).observe(now - self._start)
            self._metrics.semantic_first_token_s.labels(*self._semantic).observe(now - self._start)
        else:
            self._chunk_s.observe(now - self._last)
            for activity in self._activities:
                activity.waited(token_count, now - self._last)
        self._last = now
        self._token_count += token_count

    def finished(self, reason: FinishReason) -> None:
        """Record that the sequence finished without an error."""
        self._ended = True
        self._metrics.finished.labels(self._model, reason.name.lower()).inc()
        seconds = time.perf_counter() - self._start
        self._metrics.request_s.labels(self._model).observe(seconds)
        self._metrics.semantic_request_s.labels(*self._semantic, "").observe(seconds)
        if self._token_count > 1:
            each = (self._last - self._first) / (self._token_count - 1)
            self._metrics.token_s.labels(self._model).observe(each)
            self._metrics.semantic_token_s.labels(*self._semantic).observe(each)

    def failed(self, reason: str) -> None:
        """Record that the sequence ended in an error."""
        self._ended = True
        self._metrics.failed.labels(self._model, reason.lower()).inc()
        seconds = time.perf_counter() - self._start
        self._metrics.semantic_request_s.labels(*self._semantic, reason.lower()).observe(seconds)

    def close(self, *, is_late: bool = False) -> None:
        """Record the end of the sequence.

        If it neither finished nor failed, it was cancelled: by its deadline if `is_late`, else by
        its client.
        """
        if not self._ended and is_late:
            self.failed(Reason.DEADLINE_EXCEEDED.name)
        elif not self._ended:
            self._metrics.cancelled.labels(self._model).inc()
        self._metrics.running.labels(self._model).dec()
        self._metrics.generation_tokens.labels(self._model).inc(self._token_count)
        # A cancelled sequence may have draft tokens without accepted counts. To count only draft
        # tokens would lower the acceptance rate.
        if self._accepted_counts:
            self._metrics.drafted(self._model, self._draft_token_count, self._accepted_counts)
        else:
            self._metrics.drafted(self._model, 0, ())
