"""Counts the events of a draft stream in a drafter's metrics."""

from __future__ import annotations

from drafter_svc.metrics import Metrics, StreamMetrics
from outrider.drafter.stream import Observer
from outrider.protocol.draft_messages import DraftBatch


class CountingObserver(Observer):
    """The observer of one verifier's stream."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._stream = StreamMetrics(metrics)

    async def registered(self, address: str) -> None:
        """Count the verifier."""
        self._stream.registered()

    async def lost(self) -> None:
        """Subtract the verifier and its sequences."""
        self._stream.lost()

    def drafted(self, batch: DraftBatch, seconds: float) -> None:
        """Count a batch and its duration."""
        self._metrics.drafted(batch, seconds)

    def following(self, sequence_count: int, abandoned_count: int) -> None:
        """Set the stream's numbers of open and of abandoned sequences."""
        self._stream.following(sequence_count, abandoned_count)
