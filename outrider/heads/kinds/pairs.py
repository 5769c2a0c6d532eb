"""What EAGLE-3, EAGLE and MTP share: pairs of feature and next token, drafting step by step.

The first guess comes from the row of the last true feature. Each later step takes the state before
it for the feature that the target has not computed. Its row is behind the text, where the next true
row overwrites it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch

from outrider.heads.model import HeadModel, HeadSequence, Picker, Proposal
from outrider.heads.modules import Rows
from outrider.heads.spec import Decoder, Head
from outrider.lm.attention import LayerCache
from outrider.lm.layout import SequenceSlice


class PairModel(HeadModel):
    """A head whose rows are pairs; a kind says how a pair is run and recycled."""

    def __init__(self, head: Head) -> None:
        super().__init__(head)
        if head.spec.decoder is None:
            raise ValueError(f"a head of the kind {head.spec.kind} has decoder layers")
        self.decoder: Decoder = head.spec.decoder

    @property
    def caches(self) -> list[LayerCache]:
        """The caches of the layers."""
        return [] if self.cache is None else self.cache.layers

    @abstractmethod
    def run(self, tokens: torch.Tensor, features: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Run pairs of target ids [T] and projected features; return states [T, ·]."""

    @abstractmethod
    def recycle(self, states: torch.Tensor) -> torch.Tensor:
        """Make the next step's projected features of this step's states."""

    @abstractmethod
    def state_scores(self, states: torch.Tensor) -> torch.Tensor:
        """Float32 scores [B, draft vocabulary] of what follows."""

    def read_rows(self, slices: list[SequenceSlice], features: torch.Tensor) -> torch.Tensor:
        """As HeadModel.read_rows."""
        rows = self.rows(slices)
        states = self.run(rows.layout.token_ids, features, rows)
        return states[rows.layout.logits_indices]

    def guess(self, sequences: Sequence[HeadSequence], count: int, pick: Picker) -> Proposal:
        """As HeadModel.guess."""
        states = torch.stack([s.state for s in sequences if s.state is not None])
        tokens = pick(self.state_scores(states))
        for step in range(count - 1):
            slices = [
                SequenceSlice([token], s.kv.num_computed_tokens + step, s.kv.pages, 1)
                for s, token in zip(sequences, tokens.tolist(), strict=True)
            ]
            states = self.run(tokens, self.recycle(states), self.rows(slices))
            tokens = pick(self.state_scores(states))
        return pick.proposal()
