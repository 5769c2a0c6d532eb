"""EAGLE-3: one or more layers that guess step by step from states of several target layers."""

from __future__ import annotations

import torch
from torch.nn import ModuleList, RMSNorm

from outrider.heads.kinds.autoregressive import AutoregressiveModel
from outrider.heads.modules import Layer, RotaryRows
from outrider.heads.spec import Decoder, Head
from outrider.lm.attention import LayerCache


class FirstLayer(Layer):
    """EAGLE-3's first layer: attention over embedding and feature; the feature is the residual."""

    def __init__(self, decoder: Decoder, *, residual_normed: bool) -> None:
        super().__init__(decoder, 0, 2 * decoder.hidden_size)
        self.hidden_norm = RMSNorm(decoder.hidden_size, eps=decoder.norm_eps)
        self._residual_normed = residual_normed

    def join(
        self, embeddings: torch.Tensor, features: torch.Tensor, rows: RotaryRows, cache: LayerCache
    ) -> torch.Tensor:
        """Return the residual stream after the layer for pairs of embedding and feature."""
        normed = self.hidden_norm(features)
        both = torch.cat((self.input_layernorm(embeddings), normed), dim=-1)
        residual = normed if self._residual_normed else features
        return self.finish(residual + self.self_attn(both, rows, cache))


class Eagle3(AutoregressiveModel):
    """A head whose state is the residual stream after the last layer."""

    def __init__(self, head: Head) -> None:
        super().__init__(head)
        spec, decoder = head.spec, self.decoder
        first = FirstLayer(decoder, residual_normed=spec.residual_normed)
        others = (Layer(decoder, i) for i in range(1, decoder.layer_count))
        self.layers = ModuleList([first, *others])
        self.norm = RMSNorm(decoder.hidden_size, eps=decoder.norm_eps)

    @property
    def first(self) -> FirstLayer:
        """The layer that joins embeddings and features."""
        layer = self.layers[0]
        assert isinstance(layer, FirstLayer)
        return layer

    def run(self, tokens: torch.Tensor, features: torch.Tensor, rows: RotaryRows) -> torch.Tensor:
        """Run pairs of target ids [T] and projected features; return states [T, hidden size]."""
        x = self.first.join(self.embed(tokens), features, rows, self.caches[0])
        for layer, cache in zip(self.layers[1:], self.caches[1:], strict=True):
            x = layer(x, rows, cache)
        return x

    def recycle(self, states: torch.Tensor) -> torch.Tensor:
        """Return the next step's features."""
        if not self.spec.recycle_normed:
            return states
        normed: torch.Tensor = self.norm(states)
        return normed

    def state_scores(self, states: torch.Tensor) -> torch.Tensor:
        """Return the states' scores for the draft vocabulary."""
        return self.scores(self.norm(states) if self.spec.scores_normed else states)
