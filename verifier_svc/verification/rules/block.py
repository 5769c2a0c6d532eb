"""Block verification: Sun et al. 2024, arXiv 2403.10444, algorithm 2. In expectation it never accepts fewer tokens than token-wise
rejection, since a token that the target likes less than the drafter can be paid for by one that it likes more.
"""

from __future__ import annotations

import torch

from verifier_svc.verification.rules.sparse import AcceptedPrefixes, SparseDrafts


def accept(drafts: SparseDrafts) -> AcceptedPrefixes:
    """Accept up to the last position whose own coin comes up, not up to the first that fails.

    With w_i = min(1, w_(i-1) * target_i / draft_i) position i is the end of an accepted block with probability
    s_i / (s_i + 1 - w_i), where s_i is the mass of max(0, w_i * target - draft) over the next token, and w_i for the last position.
    """
    accepted_B = torch.zeros_like(drafts.lengths_B)
    weight_B = torch.ones_like(drafts.lengths_B, dtype=torch.float64)
    scale_B = weight_B.clone()
    count = drafts.draft_BK.shape[1]
    for i in range(1, count + 1):
        ratio_B = drafts.target_BK[:, i - 1] / drafts.draft_BK[:, i - 1].clamp(
            min=torch.finfo(torch.float64).tiny
        )
        weight_B = (weight_B * ratio_B).clamp(max=1.0)
        # Behind a draft that is shorter than others there are zeros, with which `_ends_here` is its last weight.
        chance_B = weight_B if i == count else _ends_here(drafts, i, weight_B)
        stands_B = (drafts.uniform_BK[:, i - 1] < chance_B) & (drafts.lengths_B >= i)
        accepted_B = torch.where(stands_B, i, accepted_B)
        scale_B = torch.where(stands_B, weight_B, scale_B)
    return AcceptedPrefixes(accepted_B, scale_B)


def _ends_here(drafts: SparseDrafts, i: int, weight_B: torch.Tensor) -> torch.Tensor:
    target_BE, draft_BE = drafts.target_BKE[:, i], drafts.draft_BKE[:, i]
    outside_B = weight_B * (1 - target_BE.sum(-1)).clamp(min=0)
    excess_B = outside_B + (weight_B.unsqueeze(-1) * target_BE - draft_BE).clamp(min=0).sum(-1)
    total_B = excess_B + 1 - weight_B
    # Both are 0 only where target and draft agree and nothing was ever lost: then the block goes on in any case.
    return torch.where(
        total_B > 0, excess_B / total_B.clamp(min=torch.finfo(torch.float64).tiny), 1.0
    )
