"""Decides when an engine drafts: where drafts pay, or always.

The policy is chosen when the engine starts. A request may ask for every draft too (`always_draft`
in protos/outrider/v1/common.proto); `EveryDraft` plans the steps of such requests.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from operator import itemgetter
from typing import ClassVar

from verifier_svc.policy.speculation_budget import SpeculationBudget
from verifier_svc.state.drafter import Drafter
from verifier_svc.state.sequence import Assignment

Offer = tuple[int, float, Assignment, int]
"""A draft that a sequence could have: (right guesses of its drafter, gain in tokens, assignment,
draft tokens)."""


class DraftPolicy(ABC):
    """Decides when an engine drafts, and for which drafts it waits."""

    most_tokens: ClassVar[bool]
    """True if each draft has the most tokens that are allowed, whatever the tokens cost."""
    takes_all: ClassVar[bool]
    """True if all drafters draft and each forward waits for them, whether that pays or not."""
    least_gain: ClassVar[float]
    """A draft's gain must exceed its cost by more than this number of tokens."""

    @abstractmethod
    def measures(self, budget: SpeculationBudget, batch: int) -> bool:
        """True if the next steps should have no drafts, to measure plain steps of this batch."""

    @abstractmethod
    def may_draft(self, drafter: Drafter) -> bool:
        """True if a drafter may be asked for drafts, and not only probed."""

    @abstractmethod
    def unprobed(
        self,
        budget: SpeculationBudget,
        batch: int,
        paying: frozenset[Drafter],
        known: frozenset[Drafter],
    ) -> frozenset[Drafter]:
        """Return the drafters of `known` that are not even probed."""

    @abstractmethod
    def pick(self, offers: list[Offer]) -> list[Offer]:
        """Choose which of the drafters' offers a sequence takes."""

    @abstractmethod
    def may_await(self, assignment: Assignment, beside_proven: bool) -> bool:
        """Return whether a step may wait for this drafter's draft of the sequence.

        `beside_proven` says whether a proven drafter is asked as well.
        """


class PayingDrafts(DraftPolicy):
    """Asks for drafts that raise goodput, and pauses drafters whose drafts do not. For serving."""

    most_tokens: ClassVar[bool] = False
    takes_all: ClassVar[bool] = False
    least_gain: ClassVar[float] = -1e-9

    def measures(self, budget: SpeculationBudget, batch: int) -> bool:
        """True if plain steps of this batch were not measured recently."""
        return budget.needs_baseline(batch)

    def may_draft(self, drafter: Drafter) -> bool:
        """True for a drafter that is not doubtful."""
        return not drafter.is_doubtful

    def unprobed(
        self,
        budget: SpeculationBudget,
        batch: int,
        paying: frozenset[Drafter],
        known: frozenset[Drafter],
    ) -> frozenset[Drafter]:
        """Return drafters of `known` that are not in `paying`.

        If `paying` has exhausted its budget, return all such drafters. If not, return each of them
        that makes, together with `paying`, a set that has exhausted its budget.
        """
        if not budget.allows(batch, paying):
            return known - paying
        return frozenset([d for d in known - paying if not budget.allows(batch, paying | {d})])

    def pick(self, offers: list[Offer]) -> list[Offer]:
        """Return the offer with the greatest gain; offers of proven drafters come before others.

        The first drafts of a new drafter therefore never displace the drafts of proven drafters.
        """
        return [max(offers, key=itemgetter(0, 1))]

    def may_await(self, assignment: Assignment, beside_proven: bool) -> bool:
        """True if the drafter has answered before, unless it is on trial beside a proven drafter.

        A trial beside a proven drafter therefore delays no step.
        """
        # Before its first answer a drafter may still be reading the prompt, which can take long.
        return assignment.answered_length > 0 and (assignment.drafter.proven or not beside_proven)


class EveryDraft(DraftPolicy):
    """Asks every drafter and waits for every draft, even at a loss. To measure drafters."""

    most_tokens: ClassVar[bool] = True
    takes_all: ClassVar[bool] = True
    least_gain: ClassVar[float] = -math.inf

    def measures(self, budget: SpeculationBudget, batch: int) -> bool:
        """Return False, because all steps have drafts."""
        return False

    def may_draft(self, drafter: Drafter) -> bool:
        """True for every drafter."""
        return True

    def unprobed(
        self,
        budget: SpeculationBudget,
        batch: int,
        paying: frozenset[Drafter],
        known: frozenset[Drafter],
    ) -> frozenset[Drafter]:
        """Return an empty set, since every drafter is asked anyway."""
        return frozenset()

    def pick(self, offers: list[Offer]) -> list[Offer]:
        """Return all offers."""
        return offers

    def may_await(self, assignment: Assignment, beside_proven: bool) -> bool:
        """True, also for a drafter's first draft."""
        return True


PAYING_DRAFTS = PayingDrafts()
EVERY_DRAFT = EveryDraft()
