"""Measures how long each phase of an engine step takes, for the cost model and the metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from outrider.process.clock import Clock


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The times of one step, in seconds."""

    wait_s: float
    """The seconds that the engine waited for drafts before the step."""
    phases_s: Mapping[str, float]
    """The seconds of the step's phases, keyed by name, without the wait."""

    @property
    def step_s(self) -> float:
        """The step's duration, without the wait before it."""
        return sum(self.phases_s.values())


class StepClock:
    """Times the phases of all steps of an engine, in seconds.

    If the clock was set back during a phase, the phase counts as 0 s, since neither a counter nor
    the cost model may see a negative time.
    """

    def __init__(self, clock: Clock) -> None:
        self.wait_s = 0.0
        """The seconds that the engine waited for drafts before the step."""
        self.phases_s: dict[str, float] = {}
        """The seconds of the step's phases so far, keyed by name, without the wait."""
        self._clock = clock
        self._next_wait_s = 0.0
        self._phase_began = 0.0
        # When the last two steps ended; -infinity for a step before the last idle period.
        self._ended = (-math.inf, -math.inf)

    def waited(self, seconds: float) -> None:
        """Note how long the engine waited for drafts before the coming step."""
        self._next_wait_s = seconds

    def begin(self) -> None:
        """Begin a step and its first phase."""
        self.wait_s = self._next_wait_s
        self._next_wait_s = 0.0
        self.phases_s = {}
        self._phase_began = self._clock()

    def end(self, phase: str) -> None:
        """End a phase and begin the next phase; the times of a phase that occurs twice add up."""
        now = self._clock()
        seconds = max(now - self._phase_began, 0.0)
        self.phases_s[phase] = self.phases_s.get(phase, 0.0) + seconds
        self._phase_began = now

    def end_step(self) -> float:
        """End the step; return the seconds since the step before it ended.

        The result is infinite if the engine was idle between the two steps.
        """
        before = self._ended[1]
        now = self._clock()
        self._ended = (before, now)
        return max(now - before, 0.0)

    def idle(self) -> bool:
        """Note that the engine has nothing to do; return whether it was working until now."""
        has_worked = self._ended[1] > -math.inf
        self._ended = (-math.inf, -math.inf)
        return has_worked

    def undisturbed_since(self, busy_until: float) -> bool:
        """True if drafters busy until `busy_until` were done when the previous step began."""
        return busy_until <= self._ended[0]

    def times(self) -> StepTimes:
        """Return the times of the step; they change if a further phase of the step ends."""
        return StepTimes(self.wait_s, self.phases_s)
