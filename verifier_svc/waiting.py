"""The wait for late drafts before a step: how long it may last, and what it teaches if it fails.

Reads the clock and keeps a deadline, but never sleeps: the engine's caller does.
"""

from __future__ import annotations

import math

from outrider.clock import Clock
from verifier_svc.outgoing import Outgoing
from verifier_svc.planning import Planner, awaited
from verifier_svc.scheduler import Scheduler
from verifier_svc.sequence import Assignment
from verifier_svc.step_clock import StepClock

# A wait for drafts holds client chunks for at most this long.
_LONGEST_HELD_S = 0.005


class DraftWait:
    """The wait before the coming step of one engine, on its thread."""

    def __init__(
        self,
        planner: Planner,
        scheduler: Scheduler,
        outgoing: Outgoing,
        step_clock: StepClock,
        clock: Clock,
    ) -> None:
        self._planner = planner
        self._scheduler = scheduler
        self._outgoing = outgoing
        self._step_clock = step_clock
        self._clock = clock
        self._waiting = False
        # When the wait in progress began, and how long it may last.
        self._began = 0.0
        self._budget_s = 0.0
        # The drafts that it began for, and those of them that are still missing.
        self._worth: list[Assignment] = []
        self._late: list[Assignment] = []

    def remaining_s(self) -> float:
        """Seconds after which the caller should ask again; 0 when the step should begin.

        The first call behind a step plans the coming one. Each later call looks again at the drafts
        that are still missing: they may have come, or may not pay any more.
        """
        if self._waiting:
            self._look_again()
        else:
            self._begin()
        now = self._clock()
        # If the clock was set back, the wait begins anew.
        self._began = min(self._began, now)
        rest_s = self._began + self._budget_s - now
        if self._late and rest_s > 0.0:
            return min(rest_s, self._hold_chunks(now))
        self._penalise(now)
        self._end(now)
        return 0.0

    def _hold_chunks(self, now: float) -> float:
        """Deliver client chunks that were held for long enough.

        Returns the seconds until then, infinity if no chunks are held.
        """
        held_s = self._began + _LONGEST_HELD_S - now
        if held_s <= 0.0:
            self._outgoing.tell_clients()
        return held_s if self._outgoing.holds_chunks else math.inf

    def _begin(self) -> None:
        running = self._scheduler.running
        self._waiting = True
        self._began = self._clock()
        planner = self._planner
        planner.plan(running.values())
        self._worth, self._budget_s = planner.worth_waiting_for(running.values(), self._clock())
        self._late = self._worth

    def _look_again(self) -> None:
        under_way: set[Assignment] = set()
        for sequence in self._scheduler.running.values():
            found = awaited(sequence)
            if found is not None:
                under_way.add(found[0])
        self._late = [assignment for assignment in self._worth if assignment in under_way]

    def _penalise(self, now: float) -> None:
        """Take drafters whose drafts did not come as slower than the wait.

        So the next wait is shorter, and in the end there is none.
        """
        for drafter in {assignment.drafter for assignment in self._late}:
            late = [assignment for assignment in self._late if assignment.drafter is drafter]
            overdue_s = max(-assignment.due_s(now) for assignment in late)
            drafter.round_trip.observe(2 * max(now - self._began, drafter.round_trip.value + overdue_s))

    def _end(self, now: float) -> None:
        self._waiting = False
        waited_s = max(now - self._began, 0.0)
        step_s = self._step_clock.step_s if self._planner.pausing else 0.0
        self._planner.waited(waited_s, step_s, self._worth)
        self._step_clock.waited(waited_s)
        self._worth, self._late = [], []
