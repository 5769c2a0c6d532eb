"""Grows a Llama checkpoint to a larger shape that computes the same function, so that speed is measured at a real model's cost
with real text and real acceptance, without downloading weights.

The hidden state keeps the small model's values in its first columns and zeros in the rest: embeddings and everything that writes
to it are padded with zeros, everything that reads it with noise that meets only zeros. RMSNorm divides by the mean over the new
width, which its weights and epsilon make up for. Added heads and neurons write nothing back, added layers are identities.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the grown model; each at least the small one's, and as many query heads to a key/value head as there."""

    hidden: int = 1280
    layers: int = 24
    heads: int = 20
    kv_heads: int = 4
    intermediate: int = 3456


def grow(small: Any, shape: Shape, dtype: torch.dtype) -> Any:
    """The grown model, 418 M parameters at the default shape; raises ValueError for a shape that cannot hold the small model."""
    old: Any = small.config
    old_group, group = old.num_attention_heads // old.num_key_value_heads, shape.heads // shape.kv_heads
    if shape.hidden < old.hidden_size or shape.layers < old.num_hidden_layers or shape.intermediate < old.intermediate_size:
        raise ValueError("the grown model must be at least as large as the small one")
    if shape.kv_heads < old.num_key_value_heads or group < old_group:
        raise ValueError("each key/value head needs at least the small model's query heads")
    config = LlamaConfig(
        **{
            **old.to_dict(),
            "hidden_size": shape.hidden,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "intermediate_size": shape.intermediate,
            "rms_norm_eps": old.rms_norm_eps * old.hidden_size / shape.hidden,
            "dtype": str(dtype).removeprefix("torch."),
        }
    )
    generator = torch.Generator().manual_seed(0)
    large = LlamaForCausalLM(config)
    source = small.state_dict()
    rows = _Rows(old.head_dim, old.num_key_value_heads, old_group, group)
    state = {name: _grown(name, tensor.shape, source, rows, generator) for name, tensor in large.state_dict().items()}
    large.load_state_dict(state)
    large.generation_config = small.generation_config
    cast(Any, large).to(dtype)
    large.train(False)
    return large


class _Rows:
    """Where the small model's attention heads lie among the large one's."""

    def __init__(self, head_size: int, kv_heads: int, old_group: int, group: int) -> None:
        lanes = torch.arange(head_size)
        self.query = torch.cat([lanes + head_size * (k * group + j) for k in range(kv_heads) for j in range(old_group)])
        self.key = torch.arange(head_size * kv_heads)


def _grown(name: str, shape: torch.Size, source: dict[str, torch.Tensor], rows: _Rows, generator: torch.Generator) -> torch.Tensor:
    """One tensor of the large model."""
    part = source.get(name)
    if name.endswith("norm.weight"):
        out = torch.ones(shape)
        if part is not None:
            out[: part.numel()] = part * math.sqrt(part.numel() / shape[0])
        return out
    writes = any(kind in name for kind in ("embed_tokens", "lm_head", "o_proj", "down_proj"))
    out = torch.zeros(shape) if writes else torch.randn(shape, generator=generator) * 0.02
    if part is None:
        return out
    if "o_proj" in name:
        out[: part.shape[0], rows.query] = part
    elif "q_proj" in name:
        out[rows.query, : part.shape[1]] = part
    elif "k_proj" in name or "v_proj" in name:
        out[rows.key, : part.shape[1]] = part
    else:
        out[: part.shape[0], : part.shape[1]] = part
    return out


def grown_checkpoint(small: Path, directory: Path, shape: Shape, dtype: str) -> Path:
    """The grown checkpoint of a directory with its tokenizer, made on first use."""
    out = directory / f"{small.name}-{shape.hidden}x{shape.layers}-{dtype}"
    if not (out / "config.json").is_file():
        model = LlamaForCausalLM.from_pretrained(small, dtype=torch.float32)
        AutoTokenizer.from_pretrained(small).save_pretrained(out)
        grow(model, shape, getattr(torch, dtype)).save_pretrained(out)
    return out
