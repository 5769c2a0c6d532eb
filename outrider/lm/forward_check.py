"""Compares our forward of a Llama-like model with the model's own, by a third forward in float32.

Both forwards round to the model's dtype, each in its own places. The logits of both are compared
with the logits of the same weights in float32. Our forward's error may be at most `_ROUNDED_FACTOR`
times the error of the model's own forward. If the first text shows a larger error, a second text is
computed, and so on, because the error of one text varies by chance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch.nn.functional import linear

from outrider.lm.attention import LayerCache
from outrider.lm.cpu.weights import TiledLinear
from outrider.lm.fused_linear import FusedLinearPart
from outrider.lm.layout import BatchLayout, SequenceSlice

# The number of a weight's rows that are widened at a time: in float32, the whole lm_head of a large
# vocabulary would take gigabytes.
_ROWS = 4096
_MULTIPLIES = (TiledLinear, torch.nn.Linear)
# The largest number of texts, and the number of tokens of each. In int8 both errors vary from text
# to text: for SmolLM2-135M their ratio was 0.80 to 1.39 for single texts, and 0.99 to 1.09 for six
# texts together.
_TEXTS = 6
_TOKENS = 96
# Errors are root mean squares, as fractions of the logits' standard deviation. In float32, the
# error by rounding is less than a millionth. In bfloat16 it grows with the number of layers: 0.01
# with six layers, 0.045 with the 30 layers of SmolLM2-135M.
_EXACT_TOLERANCE = 0.001
_ROUNDED_FACTOR = 1.2
# One text's error is not chance if it is more than `_MOST_BY_CHANCE` times the error of the model's
# own forward. In float32 the error of the model's own forward counts as 0, so each error above the
# tolerance is a fault.
_MOST_BY_CHANCE = 1.5


Forward = Callable[[BatchLayout], torch.Tensor]
"""Runs a forward of a layout's tokens, and returns the logits [T, V] of all tokens."""


def worse_than_own(
    model: Any, caches: Mapping[int, LayerCache], page_size: int, forward: Forward
) -> str | None:
    """Say how far off `forward` and the model's own forward are; None if `forward` is good enough.

    Overwrites the pages from 0 on.
    """
    errors = []
    for text in range(_TEXTS):
        errors.append(rounding_errors(model, caches, page_size, forward, text))
        found, own = (_root_mean_square(each) for each in zip(*errors, strict=True))
        # This comparison and the next count a NaN as an error.
        if found <= max(_EXACT_TOLERANCE, _ROUNDED_FACTOR * own):
            return None
        last, last_own = errors[-1]
        if not last <= _MOST_BY_CHANCE * last_own:
            break
    return f"off by {found:.2g} standard deviations of the logits, the own forward by {own:.2g}"


def _root_mean_square(values: Sequence[float]) -> float:
    return math.hypot(*values) / math.sqrt(len(values))


@torch.inference_mode()
def rounding_errors(
    model: Any, caches: Mapping[int, LayerCache], page_size: int, forward: Forward, text: int = 0
) -> tuple[float, float]:
    """Compute a text's logits with `forward`, with the model's own forward, and exactly.

    Return how far the first and the second result are from the exact logits: the root mean square
    of the difference, divided by the standard deviation of the exact logits. In float32 the model's
    own logits count as exact.
    """
    parameter = next(model.parameters())
    count = min(_TOKENS, page_size * next(iter(caches.values())).page_count)
    ids = [(i * i * 31 + 7 + 1009 * text) % model.config.vocab_size for i in range(count)]
    pages = list(range(-(-count // page_size)))
    layout = BatchLayout([SequenceSlice(ids, 0, pages, count)], page_size, parameter.device)
    for cache in caches.values():
        cache.layout = layout
    output = model(
        input_ids=layout.token_ids.unsqueeze(0),
        position_ids=layout.positions.unsqueeze(0),
        use_cache=False,
    )
    own = output.logits[0].float()
    exact = own
    if parameter.dtype is not torch.float32:
        exact = widened_logits(model, layout.token_ids)
    deviation = exact.std().clamp(min=1e-6)
    found, own_error = (
        float((logits - exact).square().mean().sqrt() / deviation)
        for logits in (forward(layout).float(), own)
    )
    return found, own_error


@torch.inference_mode()
def widened_logits(model: Any, token_ids: torch.Tensor) -> torch.Tensor:
    """Return float32 logits [T, V] of the tokens [T], with all activations in float32.

    `model` is built like Llama. The weights keep their rounded values, so these are the logits that
    a forward in the model's dtype approximates. To save memory, a product widens its weight in
    blocks of rows, one block at a time.
    """
    implementation = model.config._attn_implementation
    embedded = model.model.embed_tokens(token_ids).float().unsqueeze(0)
    model.set_attn_implementation("eager")
    try:
        with _widened(model):
            output = model(
                inputs_embeds=embedded,
                attention_mask=torch.ones_like(token_ids).unsqueeze(0),
                use_cache=False,
            )
    finally:
        model.set_attn_implementation(implementation)
    return cast(torch.Tensor, output.logits[0])


class _Widened(torch.nn.Module):
    """Computes a layer in float32; maps x [..., in] to [..., out]."""

    def __init__(self, layer: TiledLinear | torch.nn.Linear) -> None:
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
    """While the block runs, let every product in the model compute in float32."""
    restored: list[tuple[Any, str, Any]] = []
    for module in [*model.modules()]:
        for name, child in [*module.named_children()]:
            if isinstance(child, _MULTIPLIES):
                restored.append((module, name, child))
            elif isinstance(child, FusedLinearPart) and isinstance(child.fused.layer, _MULTIPLIES):
                restored.append((child.fused, "layer", child.fused.layer))
    for owner, name, layer in restored:
        setattr(owner, name, _Widened(layer) if isinstance(layer, _MULTIPLIES) else layer)
    try:
        yield
    finally:
        for owner, name, layer in reversed(restored):
            setattr(owner, name, layer)
