"""Rejection sampling token by token.

Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318.
"""

from __future__ import annotations

import torch

from verifier_svc.verification.rules.sparse import AcceptedPrefixes, SparseDrafts


def accept(drafts: SparseDrafts) -> AcceptedPrefixes:
    """Accept each token with probability min(1, target / draft), up to the first rejected one."""
    accepted_BK = (drafts.uniform_BK * drafts.draft_BK < drafts.target_BK) & drafts.real_BK
    accepted_B = accepted_BK.long().cumprod(-1).sum(-1)
    return AcceptedPrefixes(accepted_B, torch.ones_like(accepted_B, dtype=torch.float64))
