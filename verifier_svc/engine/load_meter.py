"""How busy the engine is, for its gateways: its queue, and how long sequences take."""

from __future__ import annotations

from collections.abc import Sized

from outrider.protocol.model_info import Load
from verifier_svc.state.sequence import Sequence

# The mean time in the batch covers about this many sequences, or this many full batches if they are
# more. The windows are wide, since a small error of the mean grows with the length of the queue.
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
        self._admitted_count = 0

    def admitted(self) -> None:
        """Note how many run, now that no other waiting sequence fits."""
        self._admitted_count = len(self._running)

    def ended(self, sequence: Sequence, now: float) -> None:
        """Count the time that a sequence was in the batch, until its client stopped reading."""
        if sequence.scheduled_at is None:
            return
        if sequence.unread_at is not None:
            now = sequence.unread_at
        seconds = max(now - sequence.scheduled_at, 0.0)
        self._ended_count += 1
        before = self._sequence_s or 0.0
        self._sequence_s = before + (seconds - before) / min(self._ended_count, self._recent)

    def load(self) -> Load:
        """The load now.

        Waiting sequences count as running in the places of those that ended since sequences
        were last admitted, because they will be in the next step.
        """
        total = len(self._running) + len(self._waiting)
        running = min(max(len(self._running), self._admitted_count), total)
        return Load(
            running,
            total - running,
            self._most_running,
            self._most_waiting,
            self._sequence_s,
        )
