"""Multi-token prediction: a decoder layer of the target's own files, after the target's layers."""

from __future__ import annotations

import torch
from torch.nn import Linear, ModuleList, RMSNorm

from outrider.heads.kinds.autoregressive import AutoregressiveModel
from outrider.heads.modules import Layer, RotaryRows, TargetsLayer
from outrider.heads.spec import Head


class Mtp(AutoregressiveModel):
    """A head whose state is the layer's normed output: lm_head and the next step read it."""

    exact = ("mlp.gate.weight", "mlp.gate.e_score_correction_bias")

    def __init__(self, head: Head) -> None:
        super().__init__(head)
        hidden, eps = self.decoder.hidden_size, self.decoder.norm_eps
        self.token_layernorm = RMSNorm(hidden, eps=eps)
        self.hidden_layernorm = RMSNorm(hidden, eps=eps)
        self.fc = Linear(2 * hidden, hidden, bias=False)
        config = head.spec.layer_config
        layer = Layer(self.decoder, 0) if config is None else TargetsLayer(config)
        self.layers = ModuleList([layer])
        self.norm = RMSNorm(hidden, eps=eps)

    def run(self, tokens: torch.Tensor, features: torch.Tensor, rows: RotaryRows) -> torch.Tensor:
        """Run pairs of target ids [T] and projected features; return states [T, hidden size]."""
        parts = [self.hidden_layernorm(features), self.token_layernorm(self.embed(tokens))]
        if not self.spec.state_first:
            parts.reverse()
        x: torch.Tensor = self.fc(torch.cat(parts, dim=-1))
        normed: torch.Tensor = self.norm(self.layers[0](x, rows, self.caches[0]))
        return normed

    def recycle(self, states: torch.Tensor) -> torch.Tensor:
        """Return the states as they are."""
        return states

    def state_scores(self, states: torch.Tensor) -> torch.Tensor:
        """Return the states' scores for the whole vocabulary."""
        return self.scores(states)
