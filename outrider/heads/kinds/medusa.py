"""Medusa: independent heads on the target's final state of the token before the last.

The target's own lm_head predicts the last committed token from that state. So the first head
predicts the token after the last committed token, without having seen the last committed token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import Linear, ModuleList
from torch.nn.functional import silu

from outrider.heads.model import HeadModel, HeadProposal, HeadSequence, Picker
from outrider.heads.spec import Head


class Medusa(HeadModel):
    """A head that keeps one state a sequence and no keys or values."""

    def __init__(self, head: Head) -> None:
        super().__init__(head)
        hidden, counts = head.spec.target.hidden_size, head.spec.block_counts
        self.heads = ModuleList(
            ModuleList(Linear(hidden, hidden, bias=head.spec.join_bias) for _ in range(count))
            for count in counts
        )
        own = any(name.startswith("outputs.") for name in head.tensors)
        size = head.spec.draft_vocab_size
        matrices = (Linear(hidden, size, bias=False) for _ in counts if own)
        self.outputs = ModuleList(matrices)

    def guess(self, sequences: Sequence[HeadSequence], count: int, pick: Picker) -> HeadProposal:
        """Guess as HeadModel.guess does, at most one token for each head."""
        states = torch.stack([s.state for s in sequences if s.state is not None])
        for i in range(min(count, len(self.heads))):
            x = states
            blocks = self.heads[i]
            assert isinstance(blocks, ModuleList)
            for block in blocks:
                x = x + silu(block(x))
            pick(self.outputs[i](x).float() if len(self.outputs) else self.scores(x))
        return pick.proposal()
