"""One direction of a drafter's connection, with all faults of a network and its queues."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from outrider_bench.simulator.events import Events


class UnreliableLink:
    """Delivers messages late, and on demand in another order, several times, or never.

    A partition holds messages back until it ends, as TCP does.
    """

    def __init__(
        self, events: Events, random: Random, latency_s: float, jitter_s: float, *, ordered: bool
    ) -> None:
        """`ordered` links never change the order, because the protocol relies on it."""
        self.latency_s = latency_s
        self.jitter_s = jitter_s
        self.slowness = 1.0
        self.shuffles = False
        self.repeats = 0.0
        """Probability that a message comes again."""
        self.loses = 0.0
        self.held_until = 0.0
        self._ordered = ordered
        self._events = events
        self._random = random
        self._last_arrival = 0.0

    def send(self, deliver: Callable[[], object], *, surely: bool = False) -> bool:
        """Run `deliver` when the message arrives; return whether the message will arrive.

        `surely` is for the beginning and the end of a stream: such a message comes exactly once,
        though a partition may hold it back.
        """
        draw = self._random
        if not surely and draw.random() < self.loses:
            return False
        self._arrive(deliver)
        if not surely:
            while draw.random() < self.repeats:
                self._arrive(deliver)
        return True

    def heal(self) -> None:
        """End all faults for further messages; earlier messages keep their times of arrival."""
        self.slowness = 1.0
        self.shuffles = False
        self.repeats = self.loses = self.held_until = 0.0

    def _arrive(self, deliver: Callable[[], object]) -> None:
        late_s = self.latency_s + self.jitter_s * self._random.random()
        at = max(self._events.now, self.held_until) + self.slowness * late_s
        if self.shuffles and not self._ordered:
            at += 0.02 * self._random.random()
        else:
            at = max(at, self._last_arrival)
            self._last_arrival = at
        self._events.at(at, deliver)
