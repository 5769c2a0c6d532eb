"""How busy the engine is, for its gateways: its queue, and how long sequences take."""

from __future__ import annotations

from collections.abc import Sized

from outrider.model_info import Load
from verifier_svc.state.sequence import Sequence

# The mean time in the batch is that of about so many sequences, and so many batches: a few per cent
# of error are many in the queue.
_SEQUENCES = 64
_BATCHES = 4


class LoadMeter:
    """For one engine, on its thread. `running` and `waiting` hold its sequences."""

    def __init__(
        self, running: Sized, waiting: Sized, most_running: int, most_waiting: int
    ) -> None:
        self._running = running
        self._waiting = waiting
        self._most_running = most_running
        self._most_waiting = most_waiting
        self._recent = max(_SEQUENCES, _BATCHES * most_running)
        self._ended_count = 0
        self._sequence_s: float | None = None

    def ended(self, sequence: Sequence, now: float) -> None:
        """Count the time that a sequence was in the batch, however it ended."""
        if sequence.scheduled_at is None:
            return
        seconds = max(now - sequence.scheduled_at, 0.0)
        self._ended_count += 1
        before = self._sequence_s or 0.0
        self._sequence_s = before + (seconds - before) / min(self._ended_count, self._recent)

    def load(self) -> Load:
        """The load now."""
        return Load(
            len(self._running),
            len(self._waiting),
            self._most_running,
            self._most_waiting,
            self._sequence_s,
        )
