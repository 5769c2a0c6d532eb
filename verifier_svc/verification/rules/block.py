"""Block verification: Sun et al. 2024, arXiv 2403.10444, algorithm 2.

In expectation it accepts at least as many tokens as token-wise rejection: a token that is likelier
under the target can make up for one that is less likely.
"""

from __future__ import annotations

import torch

from verifier_svc.verification.rules.sparse import AcceptedPrefixes, SparseDrafts

_TINY = torch.finfo(torch.float64).tiny


def accept(drafts: SparseDrafts) -> AcceptedPrefixes:
    """Accept up to the last position whose coin accepts, not up to the first that rejects.

    With w_i = min(1, w_(i-1) * target_i / draft_i), position i can end the accepted block with
    probability s_i / (s_i + 1 - w_i), where s_i is the sum of max(0, w_i * target - draft) over the
    next token; the last position with probability w_i.
    """
    accepted_B = torch.zeros_like(drafts.lengths_B)
    weight_B = torch.ones_like(drafts.lengths_B, dtype=torch.float64)
    scale_B = weight_B.clone()
    count = drafts.draft_BK.shape[1]
    for i in range(1, count + 1):
        ratio_B = drafts.target_BK[:, i - 1] / drafts.draft_BK[:, i - 1].clamp(min=_TINY)
        weight_B = (weight_B * ratio_B).clamp(max=1.0)
        # A shorter draft is padded with zeros, for which `_prob_of_end` is its last weight.
        prob_B = weight_B
        if i < count:
            prob_B = _prob_of_end(drafts, i, weight_B)
        ends_B = (drafts.uniform_BK[:, i - 1] < prob_B) & (drafts.lengths_B >= i)
        accepted_B = torch.where(ends_B, i, accepted_B)
        scale_B = torch.where(ends_B, weight_B, scale_B)
    return AcceptedPrefixes(accepted_B, scale_B)


def _prob_of_end(drafts: SparseDrafts, i: int, weight_B: torch.Tensor) -> torch.Tensor:
    """The probability that a block can end before position i, s / (s + 1 - w)."""
    target_BE = drafts.target_BKE[:, i]
    draft_BE = drafts.draft_BKE[:, i]
    outside_B = weight_B * (1 - target_BE.sum(-1)).clamp(min=0)
    excess_B = outside_B + (weight_B.unsqueeze(-1) * target_BE - draft_BE).clamp(min=0).sum(-1)
    total_B = excess_B + 1 - weight_B
    # Both are 0 only if target and draft agree and no mass was lost before: then a later coin is
    # certain to accept.
    return torch.where(total_B > 0, excess_B / total_B.clamp(min=_TINY), 1.0)
