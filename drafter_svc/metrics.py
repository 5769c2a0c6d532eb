"""A drafter's own Prometheus metrics: how fast it drafts, and what it says. What becomes of its drafts, the verifier counts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from outrider.messages import DraftBatch

if TYPE_CHECKING:
    from drafter_svc.pools.redis import RedisCounters

_SECONDS = [0.00003125 * 2**i for i in range(16)]


class Metrics:
    """Metrics of one drafter, in a registry of their own."""

    def __init__(self, drafter_id: str, family: str) -> None:
        self.drafter_id = drafter_id
        self.registry = CollectorRegistry()
        labels = {"drafter": drafter_id, "family": family}

        def counter(name: str, text: str) -> Counter:
            return Counter(f"outrider:{name}", text, list(labels), registry=self.registry).labels(
                **labels
            )

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"outrider:{name}", text, list(labels), registry=self.registry).labels(
                **labels
            )

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(
                f"outrider:{name}", text, list(labels), buckets=_SECONDS, registry=self.registry
            ).labels(**labels)

        self._draft_seconds = histogram(
            "drafter_draft_seconds", "Drafting for all sequences that have room, once."
        )
        self._tokens = counter("drafter_proposed_tokens", "Tokens proposed.")
        self._skips = counter("drafter_skips", "Sequences for which there was nothing to propose.")
        self.failed = counter(
            "drafter_failed_sequences",
            "Sequences that are not drafted for since that failed; the log has why.",
        )
        self.redis_lookup_seconds = histogram(
            "redis_lookup_seconds", "A lookup's command, until Redis answered."
        )
        self._redis_labels = labels
        self.sequences = gauge("drafter_sequences", "Sequences it drafts for.")
        self.connected = gauge("drafter_connected", "Verifiers that it is registered with.")

    def drafted(self, batch: DraftBatch, seconds: float) -> None:
        """A message of drafts was made."""
        self._draft_seconds.observe(seconds)
        self._tokens.inc(sum(len(proposal.token_ids) for proposal in batch.proposals))
        self._skips.inc(len(batch.skips))

    def watch_redis(self, counters: RedisCounters) -> None:
        """Let what is scraped include these counters."""
        self.registry.register(_RedisCollector(counters, self._redis_labels))


class StreamMetrics:
    """What the stream to one verifier adds to a drafter's metrics."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._is_registered = False
        self._sequence_count = 0
        self._abandoned_count = 0

    def registered(self) -> None:
        """The verifier took this drafter."""
        self._is_registered = True
        self._metrics.connected.inc()

    def following(self, sequence_count: int, abandoned_count: int) -> None:
        """So many sequences are open, and so many of this connection were given up."""
        self._metrics.sequences.inc(sequence_count - self._sequence_count)
        self._metrics.failed.inc(abandoned_count - self._abandoned_count)
        self._sequence_count, self._abandoned_count = sequence_count, abandoned_count

    def lost(self) -> None:
        """The connection is over, and its sequences with it."""
        self._metrics.connected.dec(self._is_registered)
        self._metrics.sequences.dec(self._sequence_count)
        self._is_registered = False
        self._sequence_count = self._abandoned_count = 0


class _RedisCollector(Collector):
    """Reads the pool's counters when somebody scrapes, so that counting costs the pool nothing."""

    def __init__(self, counters: RedisCounters, labels: Mapping[str, str]) -> None:
        self._counters = counters
        self._labels = labels

    def collect(self) -> Iterator[CounterMetricFamily]:
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
            "Commands for batches of them: sent, of those late (after 5 ms), failed or malformed; and skipped while Redis is down.",
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
