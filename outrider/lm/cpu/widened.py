"""The forward of a bfloat16 model in float32, which says how far its own rounding is off."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch.nn.functional import linear

from outrider.lm.cpu.weights import TiledLinear
from outrider.lm.fused_linear import FusedLinearPart

# Rows of a weight that are widened at a time: the head of a large vocabulary has gigabytes.
_ROWS = 4096


@torch.inference_mode()
def widened_logits(model: Any, token_ids: torch.Tensor) -> torch.Tensor:
    """Return float32 logits [T, V] of the tokens [T], with float32 between all operators.

    `model` is like Llama and was prepared by `optimize_for_cpu`. The weights keep their rounded
    values, so the logits are those that a forward in the model's dtype approximates. A copy of one
    weight at a time is in memory.
    """
    implementation = model.config._attn_implementation
    embedded = model.model.embed_tokens(token_ids).float().unsqueeze(0)
    model.set_attn_implementation("eager")
    try:
        with _widened(model):
            output = model(
                inputs_embeds=embedded,
                attention_mask=torch.ones(1, len(token_ids), dtype=torch.long),
                use_cache=False,
            )
    finally:
        model.set_attn_implementation(implementation)
    return cast(torch.Tensor, output.logits[0])


class _Widened(torch.nn.Module):
    """Computes a `TiledLinear` in float32; x [..., in] to [..., out]."""

    def __init__(self, layer: TiledLinear) -> None:
        super().__init__()
        self._layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Widen the weight in blocks of rows, one block after another."""
        weight = self._layer.weight
        products = [linear(x, rows.float()) for rows in torch.split(weight, _ROWS)]
        out = torch.cat(products, -1)
        bias = self._layer.bias
        return out if bias is None else out + bias.float()


@contextmanager
def _widened(model: torch.nn.Module) -> Iterator[None]:
    """Have every `TiledLinear` below the model compute in float32, meanwhile."""
    restored: list[tuple[Any, str, Any]] = []
    for module in [*model.modules()]:
        for name, child in [*module.named_children()]:
            if isinstance(child, TiledLinear):
                restored.append((module, name, child))
            elif isinstance(child, FusedLinearPart) and isinstance(child.fused.layer, TiledLinear):
                restored.append((child.fused, "layer", child.fused.layer))
    for owner, name, layer in restored:
        setattr(owner, name, _Widened(layer) if isinstance(layer, TiledLinear) else layer)
    try:
        yield
    finally:
        for owner, name, layer in reversed(restored):
            setattr(owner, name, layer)
