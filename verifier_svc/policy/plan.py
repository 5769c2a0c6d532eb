"""The plan of one step's drafts. `Planner.plan` makes it; everything else only reads it."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from verifier_svc.policy.draft_policy import PAYING_DRAFTS, DraftPolicy
from verifier_svc.state.drafter import Drafter
from verifier_svc.state.sequence import Assignment, Sequence

_NOBODY: frozenset[Drafter] = frozenset()


@dataclass(frozen=True, slots=True)
class Plan:
    """The decisions for one step, and the numbers behind them."""

    batch: int = 1
    """Number of decoding sequences; if there are none, the number of the last plan with some."""
    decode_step_s: float = 0.0
    """Seconds of a step without drafts; 0 before anything was measured."""
    speedup: float = 1.0
    """Expected tokens a second of this plan, divided by the tokens a second of plain decoding."""
    threshold: float = 0.0
    """The lowest acceptance probability at which a draft token is worth its place in a forward."""
    planned_ids: frozenset[int] = frozenset()
    """Ids of the sequences that the plan covers."""
    draft_tokens: Mapping[int, int] = field(default_factory=dict)
    """The maximum length of a draft path to verify, keyed by sequence id; 0 for a missing id."""
    token_costs: SequenceOf[tuple[int, float]] = ()
    """The costs of the forward's draft tokens, as in `StepCosts`; empty if drafts stay chains."""
    fixed: bool = False
    """True if a setting fixes the number of a draft's tokens, whatever their cost."""
    asks: Mapping[Assignment, int] = field(default_factory=dict)
    """Drafters to ask after this step: maps an assignment to the draft tokens to ask for."""
    tree_tokens: Mapping[Assignment, int] = field(default_factory=dict)
    """Draft tokens to ask for, all branches of a tree together; 0 for a missing assignment."""
    probes: frozenset[Assignment] = frozenset()
    """Assignments that do not pay. They get this step's verdict, to see whether they improved."""
    wait_for: tuple[tuple[Sequence, Assignment], ...] = ()
    """Pending drafts that are worth waiting for before the step."""
    wait_s: float = 0.0
    """The longest wait for the drafts of `wait_for`, in seconds."""
    policy: DraftPolicy = PAYING_DRAFTS
    """The policy that made the plan. It also says for which late drafts the engine waits."""
    always_draft_requested: bool = False
    """True if the requests have `always_draft`, so the step says nothing about what pays."""
    measuring: bool = False
    """True if the plan asks no drafter because baseline steps have to be measured."""
    paying: frozenset[Drafter] = _NOBODY
    """Drafters whose drafts are worth the wait, and drafters that are asked without a wait."""
    considered: frozenset[Drafter] = _NOBODY
    """Drafters that had a decoding sequence."""
    unprobed: frozenset[Drafter] = _NOBODY
    """Drafters that are not even probed: a probe may cost the target more than it can gain."""
