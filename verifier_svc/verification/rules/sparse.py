"""What the rules for sampled drafts look at: the target's probabilities where the drafts' sparse distributions have any."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class SparseDrafts:
    """B drafts of at most K tokens, padded with zeros; float64.

    `lengths_B` counts tokens (int64). `draft_BK` and `target_BK` are the probabilities of the drafted tokens themselves,
    `draft_BKE` and `target_BKE` those of all E tokens that the drafter could have drawn there, `uniform_BK` the noise that judges.
    """

    lengths_B: torch.Tensor
    draft_BK: torch.Tensor
    target_BK: torch.Tensor
    draft_BKE: torch.Tensor
    target_BKE: torch.Tensor
    uniform_BK: torch.Tensor

    @property
    def real_BK(self) -> torch.Tensor:
        """Which positions hold a token."""
        return torch.arange(
            self.draft_BK.shape[1], device=self.draft_BK.device
        ) < self.lengths_B.unsqueeze(-1)


@dataclass(frozen=True, slots=True)
class AcceptedPrefixes:
    """`accepted_B` tokens stand; where that is not all of a draft, the next is drawn from max(0, scale_B * target - draft)."""

    accepted_B: torch.Tensor
    scale_B: torch.Tensor
