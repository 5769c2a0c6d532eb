"""A drafter's own Prometheus metrics: how fast it drafts, and what it says. What becomes of its drafts, the verifier counts."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from outrider.messages import DraftBatch

_SECONDS = [0.00003125 * 2**i for i in range(16)]


class Metrics:
    """Metrics of one drafter, in a registry of their own."""

    def __init__(self, drafter_id: str, family: str) -> None:
        self.drafter_id = drafter_id
        self.registry = CollectorRegistry()
        labels = {"drafter": drafter_id, "family": family}

        def counter(name: str, text: str) -> Counter:
            return Counter(f"outrider:{name}", text, list(labels), registry=self.registry).labels(**labels)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"outrider:{name}", text, list(labels), registry=self.registry).labels(**labels)

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(f"outrider:{name}", text, list(labels), buckets=_SECONDS, registry=self.registry).labels(**labels)

        self._draft_seconds = histogram("drafter_draft_seconds", "Drafting for all sequences that have room, once.")
        self._tokens = counter("drafter_proposed_tokens", "Tokens proposed.")
        self._skips = counter("drafter_skips", "Sequences for which there was nothing to propose.")
        self.sequences = gauge("drafter_sequences", "Sequences it drafts for.")
        self.connected = gauge("drafter_connected", "1 while it is registered with a verifier.")

    def drafted(self, batch: DraftBatch, seconds: float) -> None:
        """A message of drafts was made."""
        self._draft_seconds.observe(seconds)
        self._tokens.inc(sum(len(proposal.token_ids) for proposal in batch.proposals))
        self._skips.inc(len(batch.skips))

    def lost(self) -> None:
        """The verifier is gone, and its sequences with it."""
        self.connected.set(0)
        self.sequences.set(0)
