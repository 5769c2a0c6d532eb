"""Plain versions of `outrider.lm.gpu.layer_kernels`, which compute as `transformers` does."""

from __future__ import annotations

import torch
from torch.nn.functional import silu
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from outrider.lm.gpu.layer_kernels import Norm


def _norm(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    module = Qwen3RMSNorm(x.shape[-1], norm.epsilon)
    module.weight = torch.nn.Parameter(norm.weight, requires_grad=False)
    out: torch.Tensor = module(x)
    return out


def add_norm(
    stream: torch.Tensor, delta: torch.Tensor | None, norm: Norm
) -> tuple[torch.Tensor, torch.Tensor]:
    total = stream if delta is None else stream + delta
    return _norm(total, norm), total


def rotate_and_store(
    heads: torch.Tensor,
    rotary: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    norms: tuple[Norm, Norm] | None,
) -> torch.Tensor:
    _, kv_heads, size = keys.shape
    by_head = heads.view(len(heads), -1, size)
    query_heads = by_head.shape[1] - 2 * kv_heads
    query, key, value = by_head.split([query_heads, kv_heads, kv_heads], 1)
    if norms is not None:
        query, key = _norm(query, norms[0]), _norm(key, norms[1])
    cos, sin = rotary
    query, key = apply_rotary_pos_emb(query, key, cos, sin)
    keys.index_copy_(0, slots, key)
    values.index_copy_(0, slots, value)
    return query


def silu_product(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return silu(gate) * up
