"""Lets events advance an engine: after a step, after a wait, and for posted work."""

from __future__ import annotations

from collections.abc import Callable

from outrider_bench.simulator.events import Events
from verifier_svc.engine.loop import Engine
from verifier_svc.engine.outbox import Delivery


class EngineActor:
    """Calls `Engine.advance` when it is due. A derived class makes the engine."""

    engine: Engine

    def __init__(self, events: Events) -> None:
        self.serving = True
        self.open_requests = 0
        self._events = events
        self._busy_until = 0.0
        # The time of the next advance, and the number of the appointment for it. Appointments with
        # earlier numbers are void.
        self._due = float("inf")
        self._appointment = 0

    def post(self, work: Callable[[], object]) -> None:
        """Post work to the engine, which runs it before its next step."""
        if self.serving:
            self.engine.post(work)
            self._advance_at(max(self._events.now, self._busy_until))

    def stop(self) -> None:
        """Vanish, without a message to anyone."""
        self.serving = False

    def _advance_at(self, time: float) -> None:
        if time < self._due:
            self._due = time
            self._appointment += 1
            number = self._appointment
            self._events.at(time, lambda: self._advance(number))

    def _advance(self, number: int) -> None:
        if number != self._appointment or not self.serving:
            return
        self._due = float("inf")
        wait_s = self.engine.advance()
        self._busy_until = self._events.now
        if wait_s is not None:
            self._advance_at(self._busy_until + wait_s)

    def _deliver(self, deliveries: list[Delivery]) -> None:
        for sink, message in deliveries:
            sink(message)
