"""Chooses the pending drafts that are worth waiting for, and for how long.

The engine waits in `verifier_svc/engine/draft_wait.py`.
"""

from __future__ import annotations

from operator import itemgetter
from typing import NamedTuple

from verifier_svc.policy.draft_policy import DraftPolicy
from verifier_svc.policy.goodput import StepCosts, max_wait_s, steps_meanwhile
from verifier_svc.state.drafter import Drafter
from verifier_svc.state.sequence import Assignment, Sequence

# No wait is longer than this, even if the policy waits for every draft: the drafter may be gone
# without a word.
_LONGEST_WAIT_S = 1.0

_Late = list[tuple[float, float, Sequence, Assignment]]
"""(due in seconds, worth in seconds, sequence, assignment) of pending drafts."""


class Pending(NamedTuple):
    """A sequence's drafts in flight, and the best of its drafts that have arrived."""

    ready_tokens: int
    """Draft tokens of the best draft that has arrived. A sampled path counts as complete."""
    expected_now: float
    """Tokens that a step should commit with that draft."""
    drafts: list[tuple[Assignment, float]]
    """Drafts in flight, each with the tokens that a step should commit with it. Drafts that promise
    no more than the best arrived draft are left out, unless the policy takes all drafts."""


_NOTHING = Pending(0, 1.0, [])


def drafts_to_wait_for(
    decoding: list[Sequence],
    draft_tokens: dict[int, int],
    costs: StepCosts,
    rate: float,
    now_s: float,
    policy: DraftPolicy,
) -> tuple[tuple[tuple[Sequence, Assignment], ...], float]:
    """Return the pending drafts that may still pay, and how many seconds of waiting they are worth.

    `draft_tokens` maps a sequence id to the number of draft tokens that the step verifies. `rate`
    is the number of tokens a second that the batch commits with the planned drafts. A policy that
    takes all drafts waits for every pending draft.
    """
    late = _pending_drafts(decoding, draft_tokens, costs, rate, now_s, policy)
    if policy.takes_all:
        everything = tuple([(sequence, assignment) for _, _, sequence, assignment in late])
        return everything, _LONGEST_WAIT_S
    # Drafts are awaited in the order in which they are due. The worth of several drafts adds up:
    # while the engine waits for a later draft, it waits for the earlier drafts as well.
    late.sort(key=itemgetter(0))
    wait_s = worth_s = 0.0
    count = 0
    busy_s: dict[Drafter, float] = {}
    for i, (due_s, seconds, _, assignment) in enumerate(late):
        worth_s += seconds
        drafter = assignment.drafter
        # Drafting on the target's cores costs this time whether the engine waits or not.
        busy_s[drafter] = max(busy_s.get(drafter, 0.0), drafter.busy_s(assignment.draft_tokens))
        most_s = min(worth_s + sum(busy_s.values()), _LONGEST_WAIT_S)
        if due_s <= most_s:
            wait_s = most_s
            count = i + 1
    return tuple([(sequence, assignment) for _, _, sequence, assignment in late[:count]]), wait_s


def _pending_drafts(
    decoding: list[Sequence],
    draft_tokens: dict[int, int],
    costs: StepCosts,
    rate: float,
    now_s: float,
    policy: DraftPolicy,
) -> _Late:
    """Return the pending drafts of all sequences.

    A draft is worth what it adds to the drafts of its sequence that are due before it.
    """
    late: _Late = []
    for sequence in decoding:
        pending = pending_drafts(sequence, draft_tokens.get(sequence.id, 0), policy)
        if not pending.drafts:
            continue
        before = pending.expected_now
        for due_s, assignment, promised in sorted(
            [(each.due_s(now_s), each, promised) for each, promised in pending.drafts],
            key=itemgetter(0),
        ):
            gain = (before, max(before, promised))
            steps = steps_meanwhile(due_s, costs.decode_step_s)
            prob = assignment.prob_all_accepted(pending.ready_tokens + steps, 1)
            seconds = max_wait_s(gain, due_s, rate, costs.batch, costs.decode_step_s, prob)
            late.append((due_s, assignment.answer_rate * seconds, sequence, assignment))
            before += assignment.answer_rate * (gain[1] - before)
    return late


def pending_drafts(sequence: Sequence, draft_tokens: int, policy: DraftPolicy) -> Pending:
    """Return the drafts in flight for a sequence that verifies at most `draft_tokens`.

    The result has only drafts that the policy may await. Unless the policy takes all drafts, each
    of them promises more than every draft that has arrived.
    """
    if draft_tokens == 0:
        return _NOTHING
    arrived: list[tuple[Assignment, int]] = []
    in_flight: list[tuple[Assignment, int]] = []
    for assignment in sequence.assignments.values():
        there = assignment.ready_tokens(draft_tokens)
        arrived.append((assignment, there))
        # The draft has no more tokens than its window has room for, however many the step would
        # verify.
        wanted = min(draft_tokens, assignment.window.depth)
        if assignment.asked and there < wanted and not assignment.trie.ready(wanted):
            in_flight.append((assignment, wanted))
    if not in_flight:
        return _NOTHING
    ready = 0
    now = 1.0
    for assignment, there in arrived:
        if (expected := assignment.rate.expected_tokens(there)) > now:
            ready = there
            now = expected
    beside_proven = any(each.asked and each.drafter.proven for each, _ in arrived)
    least = 0.0 if policy.takes_all else now
    drafts = [
        (assignment, promised)
        for assignment, wanted in in_flight
        if policy.may_await(assignment, beside_proven)
        and (promised := 1.0 + assignment.promise(wanted)[1]) > least
    ]
    return Pending(ready, now, drafts)
