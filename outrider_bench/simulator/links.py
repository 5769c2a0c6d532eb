"""A link between two processes: latency, jitter, bandwidth and loss; messages stay in order."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from outrider.protocol.draft_messages import DraftBatch, StepBatch
from outrider_bench.simulator.events import Events

# Rough sizes on the wire. A token id is a varint of one to three bytes.
_MESSAGE_BYTES = 40
_ENTRY_BYTES = 16
_TOKEN_BYTES = 2
_CONFIDENCE_BYTES = 4
_SEGMENT_BYTES = 1460


class Link:
    """One direction of a link. A changed setting applies only to messages sent afterwards.

    A message takes `latency_s`, up to `jitter_s` more, and the time for its bytes at `bytes_per_s`
    (0 is no limit). `random` belongs to this link, so its jitter does not depend on other links.
    """

    def __init__(
        self,
        events: Events,
        random: Random,
        latency_s: float = 0.0,
        jitter_s: float = 0.0,
        bytes_per_s: float = 0.0,
    ) -> None:
        self.latency_s = latency_s
        self.jitter_s = jitter_s
        self.bytes_per_s = bytes_per_s
        self.loss = 0.0
        """Share of lost segments. TCP sends them again, which delays all that follows."""
        self.retransmit_s = 0.2
        """Shortest time until a lost segment is sent again."""
        self.byte_count = 0
        """Bytes sent."""
        self._events = events
        self._random = random
        self._free_at = 0.0
        self._last_arrival = 0.0

    def send(self, byte_count: int, deliver: Callable[[], object]) -> float:
        """Send a message now and run `deliver` when it arrives; return the time of arrival."""
        self.byte_count += byte_count
        now = self._events.now
        transmitted = max(now, self._free_at)
        if self.bytes_per_s > 0.0:
            transmitted += byte_count / self.bytes_per_s
        self._free_at = transmitted
        late_s = self.jitter_s * self._random.random() if self.jitter_s > 0.0 else 0.0
        if self.loss > 0.0:
            late_s += self._lost_s(byte_count)
        arrival = max(transmitted + self.latency_s + late_s, self._last_arrival)
        self._last_arrival = arrival
        self._events.at(arrival, deliver)
        return arrival

    def _lost_s(self, byte_count: int) -> float:
        """Return the delay that lost segments cause for a message; 0 if none is lost."""
        segments = max(1, -(-byte_count // _SEGMENT_BYTES))
        if self._random.random() < (1.0 - self.loss) ** segments:
            return 0.0
        return max(self.retransmit_s, 2 * self.latency_s)


def draft_bytes(batch: DraftBatch) -> int:
    """Return the approximate size of a drafter's message on the wire."""
    tokens = sum([len(proposal.token_ids) + len(proposal.parents) for proposal in batch.proposals])
    confidences = sum([len(proposal.confidences) for proposal in batch.proposals])
    entries = len(batch.proposals) + len(batch.skips)
    payload = _TOKEN_BYTES * tokens + _CONFIDENCE_BYTES * confidences
    return _MESSAGE_BYTES + _ENTRY_BYTES * entries + payload


def step_bytes(step: StepBatch) -> int:
    """Return the approximate size of a verifier's message on the wire."""
    tokens = sum([len(opened.token_ids) for opened in step.opened])
    tokens += sum([len(verdict.new_token_ids) for verdict in step.verdicts])
    entries = len(step.opened) + len(step.verdicts) + len(step.closed)
    entries += len(step.features)
    payload = _TOKEN_BYTES * tokens + step.feature_bytes
    return _MESSAGE_BYTES + _ENTRY_BYTES * entries + payload
