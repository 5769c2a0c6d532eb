"""Inputs and outputs of the rules for sampled drafts."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class SparseDrafts:
    """B drafts of at most K tokens, padded with zeros; float64 but for the lengths."""

    lengths_B: torch.Tensor
    """Tokens of each draft, int64."""
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
        """Whether each position holds a token, bool."""
        positions_K = torch.arange(self.draft_BK.shape[1], device=self.draft_BK.device)
        return positions_K < self.lengths_B.unsqueeze(-1)


@dataclass(frozen=True, slots=True)
class AcceptedPrefixes:
    """How many tokens of each draft are accepted.

    After a rejection, the next token is drawn from max(0, scale_B * target - draft).
    """

    accepted_B: torch.Tensor
    scale_B: torch.Tensor
