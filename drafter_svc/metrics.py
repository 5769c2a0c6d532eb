"""A drafter's own Prometheus metrics: its speed and its messages.

The verifier counts accepted and rejected drafts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from outrider.protocol.draft_messages import DraftBatch

if TYPE_CHECKING:
    from drafter_svc.pools.redis import RedisCounters

_Metric = TypeVar("_Metric", Counter, Gauge, Histogram)
_BUCKETS_S = [0.00003125 * 2**i for i in range(16)]


class DrafterMetrics:
    """The metrics of one drafter process, in a registry of their own."""

    def __init__(self, drafter_id: str, family: str) -> None:
        self.drafter_id = drafter_id
        self.registry = CollectorRegistry()
        self._labels = {"drafter": drafter_id, "family": family}
        self._draft_seconds = self._histogram(
            "drafter_draft_seconds", "One round of drafting, for all sequences that have room."
        )
        self._tokens = self._counter("drafter_proposed_tokens", "Tokens proposed.")
        self._skips = self._counter(
            "drafter_skips", "Sequences for which there was nothing to propose."
        )
        self.failed = self._counter(
            "drafter_failed_sequences",
            "Sequences that get no more drafts, because drafting for them failed; see the log.",
        )
        self.redis_lookup_seconds = self._histogram(
            "redis_lookup_seconds", "A lookup's command, until Redis answered."
        )
        self.sequences = self._gauge("drafter_sequences", "Sequences that it drafts for.")
        self.connected = self._gauge("drafter_connected", "Verifiers that it is registered with.")
        self.unresolved = self._counter(
            "resolution_failures", "Times that a name of verifiers could not be resolved."
        )

    def drafted(self, batch: DraftBatch, seconds: float) -> None:
        """Count a batch of drafts that took `seconds` to make."""
        self._draft_seconds.observe(seconds)
        self._tokens.inc(sum(len(proposal.token_ids) for proposal in batch.proposals))
        self._skips.inc(len(batch.skips))

    def watch_redis(self, counters: RedisCounters) -> None:
        """Add these counters to every scrape."""
        self.registry.register(_RedisCollector(counters, self._labels))

    def _metric(self, kind: type[_Metric], name: str, text: str, **options: Any) -> _Metric:
        names = list(self._labels)
        metric = kind(f"outrider:{name}", text, names, registry=self.registry, **options)
        return metric.labels(**self._labels)

    def _counter(self, name: str, text: str) -> Counter:
        return self._metric(Counter, name, text)

    def _gauge(self, name: str, text: str) -> Gauge:
        return self._metric(Gauge, name, text)

    def _histogram(self, name: str, text: str) -> Histogram:
        return self._metric(Histogram, name, text, buckets=_BUCKETS_S)


class _RedisCollector(Collector):
    """Reads the pool's counters only when Prometheus scrapes, so that counting stays cheap."""

    def __init__(self, counters: RedisCounters, labels: Mapping[str, str]) -> None:
        self._counters = counters
        self._labels = labels

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Yield the present counters. Exporters call this on their own threads."""
        counters = self._counters
        yield self._family(
            "redis_queries",
            "Sequences looked up, or texts read.",
            "outcome",
            found=counters.found,
            missed=counters.missed,
        )
        yield self._family(
            "redis_lookups",
            "Commands that look up sequences or texts: sent; late (after 5 ms), failed or "
            "malformed among those sent; and skipped while Redis is down or late.",
            "event",
            sent=counters.lookups,
            late=counters.late,
            failed=counters.failed,
            malformed=counters.malformed,
            skipped=counters.skipped,
        )
        yield self._family(
            "redis_writes",
            "N-grams or texts offered to Redis.",
            "outcome",
            written=counters.written,
            dropped=counters.dropped,
        )

    def _family(self, name: str, text: str, label: str, **counts: int) -> CounterMetricFamily:
        family = CounterMetricFamily(f"outrider:{name}", text, labels=[*self._labels, label])
        for value, count in counts.items():
            family.add_metric([*self._labels.values(), value], count)
        return family
