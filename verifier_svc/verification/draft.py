"""The input and the result of acceptance, for one sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.protocol.draft_messages import SparseDistribution
from outrider.protocol.messages import AcceptanceRule, SpeculationOptions
from outrider.sampling.context import Context
from verifier_svc.verification.rules.lossy import LOSSY_RULES
from verifier_svc.verification.tree_walk import first_children

NO_TOKEN = -1
"""Stands in place of a token if the request's bans and grammar allow no token."""
NOT_FINITE = -2
"""Stands in place of a token if the model's logits hold NaN, +inf, or nothing but -inf."""


@dataclass(slots=True)
class Draft:
    """One sequence's share of a batch.

    There is a logits row after the last committed token, and a row after each draft token. The
    draft tokens may be a tree, but not for TOKEN_WISE and BLOCK.
    """

    context: Context
    seed: int
    rule: AcceptanceRule = AcceptanceRule.COUPLED
    distributions: Sequence[SparseDistribution] = ()
    """For TOKEN_WISE and BLOCK, the distribution that each token was sampled from; else empty."""
    options: SpeculationOptions = field(default_factory=SpeculationOptions)
    """The settings of the lossy rules."""
    thinking: Sequence[bool] = ()
    """For RELAXED, whether each draft token is in the thinking phase; only there RELAXED applies.

    Empty for other rules.
    """

    @property
    def judged(self) -> list[tuple[int, int]]:
        """The draft tokens that the rules judge: for each, the row before it and its index.

        In a tree the rules judge only first children. Any other child is accepted if it equals the
        target's own token.
        """
        if not self.context.parents:
            return [(i, i) for i in range(len(self.context.drafted))]
        return [(row, child - 1) for row, child in first_children(self.context.parents)]

    @property
    def needs_probs(self) -> bool:
        """True if the rule looks at probabilities, or if a token is sampled."""
        return not self.context.sampling.greedy or self.rule in LOSSY_RULES


@dataclass(slots=True)
class AcceptResult:
    """The number of a sequence's accepted draft tokens, and the token that follows them."""

    accepted_count: int
    next_token: int
    """The recovered, bonus or plain token; NO_TOKEN or NOT_FINITE if there is none."""
    path: list[int] | None = None
    """The rows of the accepted draft tokens of a tree, in order; None if these are the first
    rows."""

    @property
    def rows(self) -> Sequence[int]:
        """The rows of the accepted draft tokens, as in `protocol.token_tree`."""
        if self.path is None:
            return range(1, self.accepted_count + 1)
        return self.path
