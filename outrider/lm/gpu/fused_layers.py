"""The forward of a Llama-like model on a GPU, with fewer kernels than `transformers` launches.

A layer is four products, the attention and four small kernels of `layer_kernels`. Layers that share
an input are one product, because a small product reads its weight slower than a large product. The
`transformers` model stays: its modules hold the weights and the rotary embedding.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import linear

from outrider.lm.attention import LayerCache
from outrider.lm.fused_linear import (
    ATTENTION,
    GATED,
    FusedLinear,
    FusedLinearPart,
    fusible,
    joined,
    linear_of,
)
from outrider.lm.gpu.layer_kernels import Norm, add_norm, rotate_and_store, silu_product
from outrider.lm.hidden_states import HiddenStates
from outrider.lm.layout import BatchLayout, StaticLayout
from outrider.lm.support import is_built_like_llama
from outrider.protocol.draft_messages import FINAL_STATE

log = logging.getLogger(__name__)

_Joined = tuple[torch.Tensor, torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class _Layer:
    """The weights and cache of one layer; `qkv` and `gate_up` are joined weights and biases."""

    cache: LayerCache
    input_norm: Norm
    qkv: _Joined
    head_norms: tuple[Norm, Norm] | None
    output: torch.nn.Module
    post_norm: Norm
    gate_up: _Joined
    down: torch.nn.Module


class FusedForward:
    """Computes a model's forwards in place of its own forward. Not thread-safe."""

    def __init__(
        self, model: Any, caches: Mapping[int, LayerCache], states: HiddenStates | None
    ) -> None:
        """Join the model's projections in place; `states` gets the hidden states of forwards.

        Raises LookupError with the reason if the model is not supported. An unsupported model is
        left unchanged.
        """
        _check(model)
        self._model = model.model
        self._head = model.lm_head
        self._states = states
        self._layers = [_layer(layer, caches[i]) for i, layer in enumerate(model.model.layers)]
        self._norm = _norm(model.model.norm)

    @classmethod
    def of(
        cls, model: Any, name: str, caches: Mapping[int, LayerCache], states: HiddenStates | None
    ) -> FusedForward | None:
        """Return the forward of a model on a GPU; None, with a log line, if it is not supported."""
        try:
            return cls(model, caches, states)
        except LookupError as reason:
            log.info("%s is served by its own layers, with more kernels: %s", name, reason)
            return None

    def logits(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        layout: BatchLayout | StaticLayout,
        rows: torch.Tensor | int = 0,
    ) -> torch.Tensor:
        """Run the tokens [T] and write to the caches; return the logits of `rows` (0: all rows)."""
        batch, slots = layout.kernel, layout.slot_mapping
        stream = self._model.embed_tokens(token_ids)
        rotary = self._model.rotary_emb(stream.unsqueeze(0), positions.unsqueeze(0))
        rotary = rotary[0][0], rotary[1][0]
        delta = None
        for number, layer in enumerate(self._layers):
            normed, stream = add_norm(stream, delta, layer.input_norm)
            self._keep(number, stream)
            heads = linear(normed, *layer.qkv)
            keys, values = layer.cache.arrays
            query = rotate_and_store(heads, rotary, slots, keys, values, layer.head_norms)
            attended = layer.cache.attend_stored(query, batch)
            delta = layer.output(attended.view(len(attended), -1))
            normed, stream = add_norm(stream, delta, layer.post_norm)
            delta = layer.down(silu_product(linear(normed, *layer.gate_up)))
        normed, stream = add_norm(stream, delta, self._norm)
        self._keep(len(self._layers), stream)
        self._keep(FINAL_STATE, normed)
        logits: torch.Tensor = self._head(normed[rows] if torch.is_tensor(rows) else normed)
        return logits

    def _keep(self, state: int, rows: torch.Tensor) -> None:
        if self._states is not None:
            self._states.put(state, rows)


def _check(model: Any) -> None:
    """Raise LookupError with the reason if the kernels do not compute what the model does."""
    if not is_built_like_llama(model):
        raise LookupError(f"{type(model).__name__} is not built like Llama")
    size = 2 * model.model.rotary_emb.inv_freq.numel()
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        if type(mlp.act_fn).__name__ not in ("SiLU", "SiLUActivation"):
            raise LookupError(f"its activation is {type(mlp.act_fn).__name__}")
        if not fusible(attention, [ATTENTION]) or not fusible(mlp, [GATED]):
            raise LookupError("projections that share an input are not plain layers of one type")
        if attention.head_dim != size:
            raise LookupError(f"it rotates {size} channels of heads of {attention.head_dim}")


def _layer(layer: Any, cache: LayerCache) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    head_norms = None
    if hasattr(attention, "q_norm"):
        head_norms = _norm(attention.q_norm), _norm(attention.k_norm)
    return _Layer(
        cache,
        _norm(layer.input_layernorm),
        _join(attention, ATTENTION),
        head_norms,
        attention.o_proj,
        _norm(layer.post_attention_layernorm),
        _join(mlp, GATED),
        mlp.down_proj,
    )


def _norm(module: Any) -> Norm:
    return Norm(module.weight.detach(), module.variance_epsilon)


def _join(module: torch.nn.Module, names: tuple[str, ...]) -> _Joined:
    """Join these layers' weights and biases; the layers then hold views of the joined tensors.

    The model's own forward therefore computes as before, and the weights are in memory once.
    """
    (layers,) = fusible(module, [names])
    weight, bias = joined(layers)
    sizes = [layer.out_features for layer in layers]
    for layer, part in zip(layers, torch.split(weight, sizes), strict=True):
        layer.weight = torch.nn.Parameter(part, requires_grad=False)
    if bias is not None:
        for layer, part in zip(layers, torch.split(bias, sizes), strict=True):
            layer.bias = torch.nn.Parameter(part, requires_grad=False)
    _return_memory()
    return weight, bias


def join_projections(model: torch.nn.Module) -> None:
    """Join the projections of each attention, for a model that runs its own forward."""
    for module in [*model.modules()]:
        for layers in fusible(module, [ATTENTION]):
            fused = FusedLinear(layers, lambda _, weight, bias: linear_of(weight, bias))
            for index, name in enumerate(ATTENTION):
                setattr(module, name, FusedLinearPart(fused, index))
            _return_memory()


def _return_memory() -> None:
    """Return to the device the memory of layers that were joined.

    If torch kept this memory reserved, nothing could use the gaps between the layers' memory.
    """
    # This call does nothing where no GPU is used.
    torch.cuda.empty_cache()
