"""Decides how much longer a step waits for its pending drafts; the engine's caller sleeps.

`verifier_svc/policy/waits.py` decides the longest wait, which the plan holds as `wait_s`. `poll`
ends the wait earlier, once no missing draft would improve the step. If a draft does not come in
time, its drafter's measured round trip rises.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from outrider.process.clock import Clock
from verifier_svc.drafts.exchange import DraftExchange
from verifier_svc.engine.outbox import Outbox
from verifier_svc.policy.plan import Plan
from verifier_svc.policy.planner import Outline, Planner
from verifier_svc.policy.waits import pending_drafts
from verifier_svc.state.sequence import Assignment, Sequence
from verifier_svc.state.step_clock import StepClock

# A wait for drafts holds client chunks for at most this long.
_MAX_HOLD_S = 0.005
# An outline holds only if at most this share of its sequences has ended since it was made.
_ENDED_SHARE = 0.125


class Batch(Protocol):
    """The running sequences, as a scheduler has them."""

    @property
    def running(self) -> Mapping[int, Sequence]:
        """The admitted sequences, keyed by id."""

    def in_turn(self) -> Collection[Sequence]:
        """Return the running sequences whose drafts the next step may wait for."""


class DraftWait:
    """Plans the next step of one engine and waits for its drafts, on the engine's thread.

    `admit` admits the sequences that fit; it is called before each plan.
    """

    def __init__(
        self,
        batch: Batch,
        drafting: DraftExchange,
        outbox: Outbox,
        admit: Callable[[], object],
        planner: Planner,
        step_clock: StepClock,
        clock: Clock,
    ) -> None:
        self._batch = batch
        self._drafting = drafting
        self._outbox = outbox
        self._admit = admit
        self._clock = clock
        self._planner = planner
        self._step_clock = step_clock
        self._step = 0
        # The plan of the next step, and the time when it was made.
        self._plan: Plan | None = None
        self._began = 0.0
        # The outline of the next step, if there is one, and `DraftExchange.assigned` when the
        # outline was made.
        self._outline: Outline | None = None
        self._assigned = 0

    def outline(self) -> None:
        """Plan the next step, as far as that is possible, while a device computes this step.

        No outline is made without drafters, or while a sequence waits for masks. In a step that
        reads prompts, none is made either, since the next step also decodes the sequences of these
        prompts.
        """
        running = self._batch.running.values()
        if not self._drafting.roster.connected:
            return
        for sequence in running:
            if sequence.mask_work is not None or sequence.num_uncomputed_tokens != 1:
                return
        self._assigned = self._drafting.assigned
        self._outline = self._planner.outline(running, self._drafting.plan, self._step + 1)

    def poll(self) -> float:
        """Plan the next step; return the seconds until the next poll, or 0 to begin the step.

        The first call after a step admits sequences and makes the plan. Each later call checks
        again which drafts are missing: some may have come, and some may no longer pay.
        """
        plan = self._plan or self._make_plan()
        now = self._clock()
        # If the clock was set back, the wait starts again.
        self._began = min(self._began, now)
        rest_s = self._began + plan.wait_s - now
        awaited = self._awaited(plan)
        if awaited and rest_s > 0.0:
            return min(rest_s, self._hold_chunks(now))
        if not plan.always_draft_requested:
            self._penalise(awaited, now)
        self._step_clock.waited(max(now - self._began, 0.0))
        return 0.0

    def cancel(self) -> None:
        """Drop the plan, because no sequence is left for its step."""
        self._plan = self._outline = None

    def take_plan(self) -> Plan:
        """Take the plan of the step that begins now."""
        plan = self._plan or self._make_plan()
        self._plan = None
        return plan

    def _make_plan(self) -> Plan:
        """Admit the sequences that fit, and plan for all admitted sequences."""
        self._admit()
        self._step += 1
        self._began = self._clock()
        # A sequence whose masks were requested keeps the draft that the masks are for.
        running = self._batch.running.values()
        free = [sequence for sequence in running if sequence.mask_work is None]
        plan = self._outlined(free)
        if plan is None:
            plan = self._planner.plan(free, self._drafting.plan, self._step, self._began)
        self._plan = self._drafting.plan = plan
        return plan

    def _outlined(self, free: list[Sequence]) -> Plan | None:
        """Return the outline's plan, finished with the drafts that have come.

        Return None if there is no outline, if the batch or its drafters changed too much, or if
        `Planner.holds` is no longer true of the outline.
        """
        outline = self._outline
        self._outline = None
        if outline is None or self._assigned != self._drafting.assigned:
            return None
        running = self._batch.running
        planned = outline.plan.planned_ids
        ended = len(planned) - len(running)
        if len(free) < len(running) or not planned >= running.keys():
            return None
        if ended > _ENDED_SHARE * len(planned) or not self._planner.holds(outline):
            return None
        return self._planner.finish(outline.without_ended(running), self._began)

    def _hold_chunks(self, now: float) -> float:
        """Deliver client chunks after `_MAX_HOLD_S` of waiting.

        Returns the seconds until then; infinity if there are no chunks.
        """
        remaining_s = self._began + _MAX_HOLD_S - now
        if remaining_s <= 0.0:
            self._outbox.send_to_clients()
        if not self._outbox.holds_chunks:
            return math.inf
        return remaining_s

    def _awaited(self, plan: Plan) -> list[Assignment]:
        """Return missing drafts of `plan.wait_for` that promise more than the drafts at hand."""
        awaited: list[Assignment] = []
        if not plan.wait_for:
            return awaited
        in_turn = {sequence.id for sequence in self._batch.in_turn()}
        for sequence, assignment in plan.wait_for:
            if sequence.id in in_turn:
                wanted = plan.draft_tokens.get(sequence.id, 0)
                pending = pending_drafts(sequence, wanted, plan.policy)
                if any(each is assignment for each, _ in pending.drafts):
                    awaited.append(assignment)
        return awaited

    def _penalise(self, missing: list[Assignment], now: float) -> None:
        """Raise the measured round trip of drafters whose drafts did not come.

        A longer round trip makes waiting for the drafter worth less. So the engine waits for it
        less and less, and in the end not at all. A drafter that has never answered for a sequence
        is not penalised for it: the drafter may still be computing the prompt.
        """
        missing = [assignment for assignment in missing if assignment.answered_length > 0]
        waited_s = now - self._began
        for drafter in {assignment.drafter for assignment in missing}:
            own = [assignment for assignment in missing if assignment.drafter is drafter]
            overdue_s = max([-assignment.due_s(now) for assignment in own])
            drafter.round_trip.observe(2 * max(waited_s, drafter.round_trip.value + overdue_s))
