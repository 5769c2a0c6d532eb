"""Chooses, from what the planner found, which drafters a step asks for how many tokens."""

from __future__ import annotations

from verifier_svc.policy.goodput import steps_meanwhile
from verifier_svc.state.drafter import Drafter
from verifier_svc.state.merged_tries import is_sampled
from verifier_svc.state.sequence import Assignment, Sequence

# A drafter is listened to if at least this share of its first guesses are right.
_LEAST_RIGHT = 0.05
# A drafter without a right guess for `_IDLE_STEPS` steps is asked every second step. Every further
# `_IDLE_STEPS` steps halve the rate again, `_MOST_HALVINGS` times in all.
_IDLE_STEPS = 16
_MOST_HALVINGS = 3

Drafts = list[tuple[Sequence, Assignment, int]]
"""(sequence, assignment, draft tokens) of each draft."""


def draft_tokens(drafts: Drafts) -> dict[int, int]:
    """Return the maximum number of draft tokens to verify, keyed by sequence id."""
    found: dict[int, int] = {}
    for sequence, _, count in drafts:
        longest = max(count, found.get(sequence.id, 0))
        found[sequence.id] = min(longest, sequence.most_draft_tokens)
    return found


def asked_tokens(drafts: Drafts, waits: bool, decode_step_s: float) -> dict[Assignment, int]:
    """Return how many draft tokens to ask for, keyed by assignment.

    If the engine does not wait for the drafts, a draft must also cover the tokens that are
    committed before the draft arrives.
    """
    found: dict[Assignment, int] = {}
    for _, assignment, count in drafts:
        wanted = count
        if not waits:
            wanted += steps_meanwhile(assignment.drafter.latency(count), decode_step_s)
        found[assignment] = min(wanted, assignment.trie.window.depth)
    return found


def trials(
    decoding: list[Sequence],
    drafters: frozenset[Drafter],
    asked: Drafts,
    unprobed: frozenset[Drafter],
) -> Drafts:
    """Return requests for one draft token, to each drafter on trial that is not asked anyway.

    A drafter on trial is asked beside a proven drafter, or until it has answered. Nobody waits for
    the token, so it costs only a message. A drafter on the target's device would also slow down the
    target's forwards, so it gets no trials; `Planner._credible` says when it is asked.
    """
    beside_proven = any(drafter.proven for drafter in drafters)
    tried = {
        drafter
        for drafter in drafters - unprobed
        if drafter.on_trial
        and (beside_proven or not drafter.answered)
        and not drafter.on_target_device
    }
    if not tried:
        return []
    known = {assignment for _, assignment, _ in asked}
    return [
        (sequence, assignment, 1)
        for sequence in decoding
        for assignment in sequence.assignments.values()
        if assignment.drafter in tried and assignment not in known
    ]


def listened(
    decoding: list[Sequence],
    drafters: frozenset[Drafter],
    drafts: Drafts,
    limit: int,
    least_right: float,
    decode_step_s: float,
    step: int,
) -> Drafts:
    """Return drafts to ask for without a wait, from the quick drafters among `drafters`.

    A draft has at most `limit` tokens. Guesses of a quick drafter, such as an n-gram lookup, are
    usually right too seldom to be worth a wait. But where a text begins to repeat itself, the
    commit shows that a guess was right, and the rest of the draft is there for the next step.
    Within repeats, at least the share `least_right` of guesses must be right; otherwise verifying
    them costs more than it gains.
    """
    heard = {
        drafter
        for drafter in drafters
        if drafter.proven
        and not drafter.silent
        and drafter.is_quick(decode_step_s)
        and drafter.latency(1) <= decode_step_s
    }
    if not heard:
        return []
    known = {assignment for _, assignment, _ in drafts}
    return [
        (sequence, assignment, min(limit, assignment.drafter.hello.max_draft_tokens))
        for sequence in decoding
        for assignment in sequence.assignments.values()
        if assignment.drafter in heard
        and assignment not in known
        and step % (1 << min(assignment.idle_steps // _IDLE_STEPS, _MOST_HALVINGS)) == 0
        and assignment.drafter_rates[0].by_position[0] >= _LEAST_RIGHT
        and assignment.rates[-1].by_position[0] >= least_right
    ]


def companions(drafts: Drafts, paying: frozenset[Drafter], threshold: float) -> Drafts:
    """Return the drafts to ask companions for: their guesses join the chosen drafter's in a tree.

    If the chosen drafter's draft does not come, companions' guesses replace it. Only drafters in
    `paying` that take no time of the target's cores are companions, so a companion costs only a
    message. The engine waits for a companion's draft only where this draft promises more than the
    ready drafts.
    """
    found: Drafts = []
    if len(paying) < 2:
        return found
    chosen = {assignment for _, assignment, _ in drafts}
    for sequence, assignment, count in drafts:
        for other in sequence.assignments.values():
            drafter = other.drafter
            if (
                other not in chosen
                and drafter in paying
                and drafter.busy_s(count) == 0.0
                and _prob_beside(other, assignment) >= threshold
                and not is_sampled(sequence)
            ):
                found.append((sequence, other, min(count, drafter.hello.max_draft_tokens)))
    return found


def _prob_beside(other: Assignment, chosen: Assignment) -> float:
    """Return the probability that `other` has a right first token where `chosen` has none."""
    right = other.rate.by_position[0]
    claim = (1.0 - chosen.rate.by_position[0]) * right
    chance = chosen.chance
    return (1.0 - chance) * right + chance * other.sibling_rates.estimate(0, 0, claim)


def due_probes(
    decoding: list[Sequence], asks: dict[Assignment, int], unprobed: frozenset[Drafter], step: int
) -> frozenset[Assignment]:
    """Return the assignments to probe in this step.

    Assignments with the same interval are probed in the same step, since a drafter drafts many
    sequences at once.
    """
    return frozenset(
        [
            assignment
            for sequence in decoding
            for assignment in sequence.assignments.values()
            if assignment not in asks
            and assignment.drafter not in unprobed
            and step % assignment.backoff == 0
        ]
    )
