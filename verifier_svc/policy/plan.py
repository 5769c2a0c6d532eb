"""What one step does about drafts. `Planner.plan` makes it; everything else only reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from verifier_svc.state.drafter import Drafter
from verifier_svc.state.sequence import Assignment, Sequence

_NOBODY: frozenset[Drafter] = frozenset()


@dataclass(frozen=True, slots=True)
class Plan:
    """The decisions for one step, and what they rest on."""

    batch: int = 1
    """Sequences that decode; those of the last such plan if none does."""
    decode_step_s: float = 0.0
    """Seconds of a step without drafts; 0 before anything was measured."""
    speedup: float = 1.0
    """Tokens a second that are expected of this plan, over those of plain decoding."""
    price: float = 0.0
    """The chance of being committed from which on a draft token is worth its place in a forward."""
    planned_ids: frozenset[int] = frozenset()
    """The sequences that it was made for."""
    draft_tokens: Mapping[int, int] = field(default_factory=dict)
    """Most draft tokens that the step verifies, by sequence id; sequences that draft nothing are missing."""
    asks: Mapping[Assignment, int] = field(default_factory=dict)
    """Drafters to ask behind this step, by assignment, with the draft tokens to ask for. All others hear nothing."""
    probes: frozenset[Assignment] = frozenset()
    """Assignments that do not pay and are told of this step all the same, to see whether their guesses got better."""
    wait_for: tuple[tuple[Sequence, Assignment], ...] = ()
    """Drafts under way that are worth waiting for before the step."""
    wait_s: float = 0.0
    """Seconds that they are worth."""
    always: bool = False
    """Whether every draft is waited for, a sequence's first one too."""
    paying: frozenset[Drafter] = _NOBODY
    """Drafters whose drafts make up for the wait for them."""
    considered: frozenset[Drafter] = _NOBODY
    """Drafters that had a decoding sequence."""
    silent: frozenset[Drafter] = _NOBODY
    """Drafters that are told of nothing, since even that may cost the target more than it can gain."""


class Pending(NamedTuple):
    """A draft under way that is better than what is there."""

    assignment: Assignment
    ready_tokens: int
    """Draft tokens that are there."""
    expected_now: float
    """Tokens that a step is expected to commit with those."""
    expected_with_it: float


def pending_draft(sequence: Sequence, draft_tokens: int, *, always: bool) -> Pending | None:
    """The best draft under way for a sequence that verifies at most `draft_tokens`.

    Returns None if nothing better is under way. A drafter's first answer counts as under way only
    with `always`.
    """
    if draft_tokens == 0:
        return None
    best: Assignment | None = None
    promised = 0.0
    for assignment in sequence.assignments.values():
        # Before its first answer a drafter may still be at the prompt, which can take long.
        if assignment.asked and (always or assignment.answered_length > 0):
            wanted = min(draft_tokens, assignment.drafter.hello.max_draft_tokens)
            if not assignment.trie.ready(wanted):
                expected = assignment.rate.expected_tokens(wanted)
                if expected > promised:
                    best, promised = assignment, expected
    if best is None:
        return None
    ready, now = 0, 1.0
    for assignment in sequence.assignments.values():
        there = assignment.trie.length(draft_tokens)
        if (expected := assignment.rate.expected_tokens(there)) > now:
            ready, now = there, expected
    return Pending(best, ready, now, promised) if promised > now else None
