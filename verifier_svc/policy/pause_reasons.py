"""Explains why steps of a sequence verified no draft. Decides nothing."""

from __future__ import annotations

from outrider.protocol.messages import PauseReason, SpeculationPause
from verifier_svc.policy.plan import Plan
from verifier_svc.policy.speculation_budget import SpeculationBudget
from verifier_svc.state.sequence import Sequence

# The explanation says how long a draft of `_TIMED_TOKENS` tokens takes, or a shorter draft if the
# sequence never verifies that many.
_TIMED_TOKENS = 4
# A doubtful drafter counts as wrong, and not as a drafter without guesses, if at least this share
# of its answers holds a draft.
_ANSWERS = 0.5


def pause_reason(sequence: Sequence, plan: Plan, budget: SpeculationBudget) -> PauseReason:
    """Return why the step of this plan verified no draft of the sequence.

    Call it before the step's verdict is sent.
    """
    assignments = sequence.assignments.values()
    if not assignments:
        return PauseReason.NO_DRAFTER
    if plan.measuring:
        return PauseReason.MEASURING
    if any(assignment.asked for assignment in assignments):
        return PauseReason.NO_GUESS
    drafters = {assignment.drafter for assignment in assignments}
    if all(drafter.is_doubtful for drafter in drafters):
        skips = all(drafter.answer_rate < _ANSWERS for drafter in drafters)
        return PauseReason.NO_GUESS if skips else PauseReason.LOW_ACCEPTANCE
    if not drafters.isdisjoint(plan.paying):
        return PauseReason.LOW_ACCEPTANCE
    if not any(budget.allows(plan.batch, frozenset([drafter])) for drafter in drafters):
        return PauseReason.BUDGET
    return PauseReason.TOO_SLOW


def pause_of(sequence: Sequence, plan: Plan) -> SpeculationPause | None:
    """Return why at least half of a sequence's steps verified no draft.

    Return None if most verified a draft.
    """
    counts = sequence.pauses
    step_count = sum(counts.values())
    if step_count == 0 or step_count < sequence.stats.draft_count:
        return None
    reason = max(counts, key=lambda reason: counts[reason])
    tokens = min(sequence.max_draft_tokens, _TIMED_TOKENS)
    known = [a.drafter for a in sequence.assignments.values() if a.drafter.round_trip.value > 0.0]
    draft_s = min([drafter.latency(tokens) for drafter in known], default=None)
    return SpeculationPause(reason, step_count, plan.decode_step_s or None, draft_s)
