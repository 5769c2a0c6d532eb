"""Counts the events of a draft stream in a drafter's metrics."""

from __future__ import annotations

from drafter_svc.metrics import DrafterMetrics
from outrider.drafter.stream import Observer
from outrider.protocol.draft_messages import DraftBatch


class CountingObserver(Observer):
    """Counts the events of one verifier's stream."""

    def __init__(self, metrics: DrafterMetrics) -> None:
        self._metrics = metrics
        self._is_registered = False
        self._sequence_count = 0
        self._abandoned_count = 0

    async def registered(self, address: str) -> None:
        """Count the verifier, which has registered this drafter."""
        self._is_registered = True
        self._metrics.connected.inc()

    async def lost(self) -> None:
        """Subtract the verifier and its sequences: the stream has ended."""
        self._metrics.connected.dec(self._is_registered)
        self._metrics.sequences.dec(self._sequence_count)
        self._is_registered = False
        self._sequence_count = 0
        self._abandoned_count = 0

    def drafted(self, batch: DraftBatch, seconds: float) -> None:
        """Count a batch and its duration."""
        self._metrics.drafted(batch, seconds)

    def following(self, sequence_count: int, abandoned_count: int) -> None:
        """Set the number of open sequences, and of sequences abandoned since the stream began."""
        self._metrics.sequences.inc(sequence_count - self._sequence_count)
        self._metrics.failed.inc(abandoned_count - self._abandoned_count)
        self._sequence_count = sequence_count
        self._abandoned_count = abandoned_count
