"""EAGLE-1 and EAGLE-2: an ordinary layer that continues the target's final states.

The two differ only in how a tree is built from their guesses.
"""

from __future__ import annotations

import torch
from torch.nn import Linear, ModuleList

from outrider.heads.kinds.autoregressive import AutoregressiveModel
from outrider.heads.modules import Layer, RotaryRows
from outrider.heads.spec import Head


class Eagle(AutoregressiveModel):
    """A head whose state stands for the target's final state: lm_head reads it."""

    def __init__(self, head: Head) -> None:
        super().__init__(head)
        hidden = self.decoder.hidden_size
        self.fc = Linear(2 * hidden, hidden, bias=head.spec.join_bias)
        layers = range(self.decoder.layer_count)
        # The first layer was trained without a norm of its input.
        self.layers = ModuleList(Layer(self.decoder, i, norm=i > 0) for i in layers)

    def run(self, tokens: torch.Tensor, features: torch.Tensor, rows: RotaryRows) -> torch.Tensor:
        """Run pairs of target ids [T] and projected features; return states [T, hidden size]."""
        x: torch.Tensor = self.fc(torch.cat((self.embed(tokens), features), dim=-1))
        for layer, cache in zip(self.layers, self.caches, strict=True):
            x = layer(x, rows, cache)
        return x

    def recycle(self, states: torch.Tensor) -> torch.Tensor:
        """Return the states as they are."""
        return states

    def state_scores(self, states: torch.Tensor) -> torch.Tensor:
        """Return the states' scores for the whole vocabulary."""
        return self.scores(states)
