"""Rules for drafts that a trusted drafter sampled: the output stays the target's.

Each rule takes a batch of drafts with their probabilities. `tests/losslessness/reference.py` has
the same rules for one sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from outrider.protocol.messages import AcceptanceRule

_TINY = torch.finfo(torch.float64).tiny


@dataclass(frozen=True, slots=True)
class SparseDrafts:
    """B drafts of at most K tokens, padded with zeros.

    All fields except the lengths are float64.
    """

    lengths_B: torch.Tensor
    """The number of tokens of each draft, int64."""
    draft_BK: torch.Tensor
    """The drafter's probability of each drafted token."""
    target_BK: torch.Tensor
    """The target's probability of each drafted token."""
    draft_BKE: torch.Tensor
    """The drafter's probabilities of the E tokens that it could have drawn at each position."""
    target_BKE: torch.Tensor
    """The target's probabilities of the same tokens."""
    uniform_BK: torch.Tensor
    """Random numbers in [0, 1) that decide about acceptance."""

    @property
    def real_BK(self) -> torch.Tensor:
        """A bool for each position: True if the position holds a token."""
        positions_K = torch.arange(self.draft_BK.shape[1], device=self.draft_BK.device)
        return positions_K < self.lengths_B.unsqueeze(-1)


@dataclass(frozen=True, slots=True)
class AcceptedPrefixes:
    """How many tokens of each draft are accepted.

    After a rejection, the next token is drawn from max(0, scale_B * target - draft).
    """

    accepted_B: torch.Tensor
    scale_B: torch.Tensor


def token_wise(drafts: SparseDrafts) -> AcceptedPrefixes:
    """Apply rejection sampling token by token.

    Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318. Accepts each token
    with probability min(1, target / draft), up to the first rejected token.
    """
    accepted_BK = (drafts.uniform_BK * drafts.draft_BK < drafts.target_BK) & drafts.real_BK
    accepted_B = accepted_BK.long().cumprod(-1).sum(-1)
    return AcceptedPrefixes(accepted_B, torch.ones_like(accepted_B, dtype=torch.float64))


def block(drafts: SparseDrafts) -> AcceptedPrefixes:
    """Apply block verification (Sun et al. 2024, arXiv 2403.10444, algorithm 2).

    Accepts up to the last position whose coin accepts, not up to the first position whose coin
    rejects. In expectation this accepts at least as many tokens as `token_wise`: a token that is
    likelier under the target can make up for a token that is less likely.

    With w_i = min(1, w_(i-1) * target_i / draft_i), position i can end the accepted block with
    probability s_i / (s_i + 1 - w_i), where s_i is the sum of max(0, w_i * target - draft) over the
    next token. The last position can end it with probability w_i.
    """
    accepted_B = torch.zeros_like(drafts.lengths_B)
    weight_B = torch.ones_like(drafts.lengths_B, dtype=torch.float64)
    scale_B = weight_B.clone()
    count = drafts.draft_BK.shape[1]
    for i in range(1, count + 1):
        ratio_B = drafts.target_BK[:, i - 1] / drafts.draft_BK[:, i - 1].clamp(min=_TINY)
        weight_B = (weight_B * ratio_B).clamp(max=1.0)
        # A shorter draft is padded with zeros. For padding, `_prob_of_end` returns the draft's last
        # weight.
        prob_B = weight_B
        if i < count:
            prob_B = _prob_of_end(drafts, i, weight_B)
        ends_B = (drafts.uniform_BK[:, i - 1] < prob_B) & (drafts.lengths_B >= i)
        accepted_B = torch.where(ends_B, i, accepted_B)
        scale_B = torch.where(ends_B, weight_B, scale_B)
    return AcceptedPrefixes(accepted_B, scale_B)


def _prob_of_end(drafts: SparseDrafts, i: int, weight_B: torch.Tensor) -> torch.Tensor:
    """Return the probability that a block can end before position i, s / (s + 1 - w)."""
    target_BE = drafts.target_BKE[:, i]
    draft_BE = drafts.draft_BKE[:, i]
    outside_B = weight_B * (1 - target_BE.sum(-1)).clamp(min=0)
    excess_B = outside_B + (weight_B.unsqueeze(-1) * target_BE - draft_BE).clamp(min=0).sum(-1)
    total_B = excess_B + 1 - weight_B
    # `excess_B` and `total_B` are both 0 only if target and draft agree and no mass was lost
    # before: then a later coin is certain to accept.
    return torch.where(total_B > 0, excess_B / total_B.clamp(min=_TINY), 1.0)


SAMPLED_RULES: dict[AcceptanceRule, Callable[[SparseDrafts], AcceptedPrefixes]] = {
    AcceptanceRule.TOKEN_WISE: token_wise,
    AcceptanceRule.BLOCK: block,
}
