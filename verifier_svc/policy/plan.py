"""The plan of one step's drafts. `Planner.plan` makes it; everything else only reads it."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import NamedTuple

from verifier_svc.state.drafter import Drafter
from verifier_svc.state.sequence import Assignment, Sequence

_NOBODY: frozenset[Drafter] = frozenset()


@dataclass(frozen=True, slots=True)
class Plan:
    """The decisions for one step, and the numbers behind them."""

    batch: int = 1
    """The number of decoding sequences; without any, that of the last plan with some."""
    decode_step_s: float = 0.0
    """Seconds of a step without drafts; 0 before anything was measured."""
    speedup: float = 1.0
    """Expected tokens a second of this plan, over those of plain decoding."""
    price: float = 0.0
    """The lowest acceptance probability at which a draft token is worth its place in a forward."""
    planned_ids: frozenset[int] = frozenset()
    """Ids of the sequences that the plan covers."""
    draft_tokens: Mapping[int, int] = field(default_factory=dict)
    """Most draft tokens of a path that the step verifies, by sequence id; 0 for a missing id."""
    token_prices: SequenceOf[tuple[int, float]] = ()
    """The prices of the forward's draft tokens, as in `Prices`; empty if drafts stay chains."""
    fixed: bool = False
    """Whether each draft has a fixed number of tokens, whatever their price."""
    asks: Mapping[Assignment, int] = field(default_factory=dict)
    """Drafters to ask behind this step: draft tokens to ask for, by assignment."""
    tree_tokens: Mapping[Assignment, int] = field(default_factory=dict)
    """Draft tokens of all branches together to ask for, by assignment; 0 for a missing one."""
    probes: frozenset[Assignment] = frozenset()
    """Assignments that do not pay, but get this step's verdict to see whether they improved."""
    wait_for: tuple[tuple[Sequence, Assignment], ...] = ()
    """Pending drafts that are worth waiting for before the step."""
    wait_s: float = 0.0
    """The longest such wait in seconds."""
    always: bool = False
    """Whether every draft is waited for, a sequence's first one too."""
    insisted: bool = False
    """Whether the requests insist on drafts, so the step says nothing about what pays."""
    measuring: bool = False
    """Whether no drafter is asked, so that quiet steps can be measured."""
    paying: frozenset[Drafter] = _NOBODY
    """Drafters whose drafts make up for the wait for them."""
    considered: frozenset[Drafter] = _NOBODY
    """Drafters that had a decoding sequence."""
    silent: frozenset[Drafter] = _NOBODY
    """Drafters that are not even probed: a probe may cost the target more than it can gain."""


class Pending(NamedTuple):
    """A draft in flight that is better than the drafts that have arrived."""

    assignment: Assignment
    ready_tokens: int
    """Draft tokens that have arrived. A sampled path counts as complete."""
    expected_now: float
    """Tokens that a step should commit with those."""
    expected_with_it: float
    """Tokens that a step should commit with the pending draft."""


def pending_draft(sequence: Sequence, draft_tokens: int, *, always: bool) -> Pending | None:
    """The best draft in flight for a sequence that verifies at most `draft_tokens`.

    Returns None if no draft in flight is better than the ready one. A drafter's first answer counts
    as in flight only with `always`.
    """
    if draft_tokens == 0:
        return None
    best: Assignment | None = None
    promised = 0.0
    for assignment in sequence.assignments.values():
        # Before its first answer a drafter may still be at the prompt, which can take long.
        if assignment.asked and (always or assignment.answered_length > 0):
            wanted = min(draft_tokens, assignment.drafter.hello.max_draft_tokens)
            if not assignment.trie.ready(wanted) and assignment.ready_tokens(wanted) < wanted:
                expected = assignment.rate.expected_tokens(wanted)
                if expected > promised:
                    best = assignment
                    promised = expected
    if best is None:
        return None
    ready = 0
    now = 1.0
    for assignment in sequence.assignments.values():
        there = assignment.ready_tokens(draft_tokens)
        if (expected := assignment.rate.expected_tokens(there)) > now:
            ready = there
            now = expected
    return Pending(best, ready, now, promised) if promised > now else None
