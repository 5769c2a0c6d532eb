"""A drafter's own Prometheus metrics: how fast it drafts and what it sends.

The verifier counts what becomes of the drafts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from outrider.protocol.draft_messages import DraftBatch

if TYPE_CHECKING:
    from drafter_svc.pools.redis import RedisCounters

_BUCKETS_S = [0.00003125 * 2**i for i in range(16)]


class Metrics:
    """The metrics of one drafter process, in a registry of their own."""

    def __init__(self, drafter_id: str, family: str) -> None:
        self.drafter_id = drafter_id
        self.registry = CollectorRegistry()
        self._labels = {"drafter": drafter_id, "family": family}
        self._draft_seconds = self._histogram(
            "drafter_draft_seconds", "Drafting for all sequences that have room, once."
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

    def _counter(self, name: str, text: str) -> Counter:
        counter = Counter(f"outrider:{name}", text, list(self._labels), registry=self.registry)
        return counter.labels(**self._labels)

    def _gauge(self, name: str, text: str) -> Gauge:
        gauge = Gauge(f"outrider:{name}", text, list(self._labels), registry=self.registry)
        return gauge.labels(**self._labels)

    def _histogram(self, name: str, text: str) -> Histogram:
        names = list(self._labels)
        histogram = Histogram(
            f"outrider:{name}", text, names, buckets=_BUCKETS_S, registry=self.registry
        )
        return histogram.labels(**self._labels)


class StreamMetrics:
    """Counts the stream to one verifier in a drafter's gauges and failures."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._is_registered = False
        self._sequence_count = 0
        self._abandoned_count = 0

    def registered(self) -> None:
        """Count the verifier, which has registered this drafter."""
        self._is_registered = True
        self._metrics.connected.inc()

    def following(self, sequence_count: int, abandoned_count: int) -> None:
        """Set the number of open sequences, and of sequences abandoned since the stream began."""
        self._metrics.sequences.inc(sequence_count - self._sequence_count)
        self._metrics.failed.inc(abandoned_count - self._abandoned_count)
        self._sequence_count = sequence_count
        self._abandoned_count = abandoned_count

    def lost(self) -> None:
        """Subtract the verifier and its sequences: the stream has ended."""
        self._metrics.connected.dec(self._is_registered)
        self._metrics.sequences.dec(self._sequence_count)
        self._is_registered = False
        self._sequence_count = 0
        self._abandoned_count = 0


class _RedisCollector(Collector):
    """Reads the pool's counters only when Prometheus scrapes, so that counting stays cheap."""

    def __init__(self, counters: RedisCounters, labels: Mapping[str, str]) -> None:
        self._counters = counters
        self._labels = labels

    def collect(self) -> Iterator[CounterMetricFamily]:
        """The counters now. Exporters call it, on threads of their own."""
        counters = self._counters
        yield self._family(
            "redis_queries",
            "Sequences looked up.",
            "outcome",
            found=counters.found,
            missed=counters.missed,
        )
        yield self._family(
            "redis_lookups",
            "Commands that look up a batch of sequences: sent; of those late (after 5 ms), "
            "failed or malformed; and skipped while Redis is down or late.",
            "event",
            sent=counters.lookups,
            late=counters.late,
            failed=counters.failed,
            malformed=counters.malformed,
            skipped=counters.skipped,
        )
        yield self._family(
            "redis_writes",
            "N-grams offered.",
            "outcome",
            written=counters.written,
            dropped=counters.dropped,
        )

    def _family(self, name: str, text: str, label: str, **counts: int) -> CounterMetricFamily:
        family = CounterMetricFamily(f"outrider:{name}", text, labels=[*self._labels, label])
        for value, count in counts.items():
            family.add_metric([*self._labels.values(), value], count)
        return family
