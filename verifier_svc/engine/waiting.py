"""The wait for late drafts before a step: how long it may last, and what it teaches if it fails.

Reads the clock and keeps a deadline, but never sleeps: the engine's caller does.
"""

from __future__ import annotations

import math

from outrider.clock import Clock
from verifier_svc.drafts.exchange import DraftExchange
from verifier_svc.engine.admission import Admission
from verifier_svc.engine.outgoing import Outgoing
from verifier_svc.engine.scheduler import Scheduler
from verifier_svc.policy.plan import Plan, pending_draft
from verifier_svc.policy.planner import Planner
from verifier_svc.state.sequence import Assignment
from verifier_svc.state.step_clock import StepClock

# A wait for drafts holds client chunks for at most this long.
_LONGEST_HELD_S = 0.005


class DraftWait:
    """Plans the coming step of one engine and waits for its drafts, on the engine's thread."""

    def __init__(
        self,
        planner: Planner,
        admission: Admission,
        scheduler: Scheduler,
        drafting: DraftExchange,
        outgoing: Outgoing,
        step_clock: StepClock,
        clock: Clock,
    ) -> None:
        self._planner = planner
        self._admission = admission
        self._scheduler = scheduler
        self._drafting = drafting
        self._outgoing = outgoing
        self._step_clock = step_clock
        self._clock = clock
        self._step = 0
        # The plan of the coming step, once it is made, and when that was.
        self._plan: Plan | None = None
        self._began = 0.0

    def remaining_s(self) -> float:
        """Seconds after which the caller should ask again; 0 when the step should begin.

        The first call behind a step plans the coming one. Each later call looks again at the drafts
        that are still missing: they may have come, or may not pay any more.
        """
        plan = self._plan or self._make_plan()
        now = self._clock()
        # If the clock was set back, the wait begins anew.
        self._began = min(self._began, now)
        rest_s = self._began + plan.wait_s - now
        late = self._late(plan)
        if late and rest_s > 0.0:
            return min(rest_s, self._hold_chunks(now))
        self._penalise(late, now)
        self._step_clock.waited(max(now - self._began, 0.0))
        return 0.0

    def cancel(self) -> None:
        """Drop the plan of a step that will not be: nothing is left to do."""
        self._plan = None

    def take_plan(self) -> Plan:
        """The plan of the step that begins now."""
        plan, self._plan = self._plan or self._make_plan(), None
        return plan

    def _make_plan(self) -> Plan:
        """Admit what fits and plan for all that is admitted."""
        self._admission.admit()
        self._step += 1
        self._began = self._clock()
        running = self._scheduler.running.values()
        plan = self._planner.plan(running, self._drafting.plan, self._step, self._began)
        self._plan = self._drafting.plan = plan
        return plan

    def _hold_chunks(self, now: float) -> float:
        """Deliver client chunks that were held for long enough.

        Returns the seconds until then, infinity if no chunks are held.
        """
        held_s = self._began + _LONGEST_HELD_S - now
        if held_s <= 0.0:
            self._outgoing.tell_clients()
        return held_s if self._outgoing.holds_chunks else math.inf

    def _late(self, plan: Plan) -> list[Assignment]:
        """The drafts of `plan.wait_for` that are still under way and still the best of their sequences."""
        late: list[Assignment] = []
        for sequence, assignment in plan.wait_for:
            if sequence.id in self._scheduler.running:
                wanted = plan.draft_tokens.get(sequence.id, 0)
                pending = pending_draft(sequence, wanted, always=plan.always)
                if pending is not None and pending.assignment is assignment:
                    late.append(assignment)
        return late

    def _penalise(self, late: list[Assignment], now: float) -> None:
        """Take drafters whose drafts did not come as slower than the wait.

        So the next wait is shorter, and in the end there is none. The time before a first answer
        says nothing: the drafter may still be at the prompt.
        """
        late = [assignment for assignment in late if assignment.answered_length > 0]
        for drafter in {assignment.drafter for assignment in late}:
            overdue_s = max(
                [-assignment.due_s(now) for assignment in late if assignment.drafter is drafter]
            )
            drafter.round_trip.observe(
                2 * max(now - self._began, drafter.round_trip.value + overdue_s)
            )
