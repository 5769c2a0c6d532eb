"""Grows a Llama checkpoint to a larger shape that computes the same function.

The grown model is as slow as a real model of its size, while text and acceptance stay the small
model's. So speed can be measured without a download of weights.

The first columns of the hidden state hold the small model's values, and all other columns hold
zeros. Weights that write to the hidden state, and the weights of `lm_head`, are padded with zeros.
Weights that read the hidden state are padded with noise, which is multiplied by zeros. RMSNorm
takes the mean square over the larger width; its weights and epsilon are scaled to cancel the
difference. Added heads and neurons write zeros, and added layers are identities.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

# Noise is drawn once and repeated: drawing it for each of 8 B parameters would take minutes. The
# count is a prime, so that rows differ.
_NOISE_COUNT = 1_000_003


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of the grown model, each at least as large as in the small model.

    A key/value head needs at least as many query heads as in the small model. `hidden` must be a
    multiple of `heads`.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab_size: int = 0
    """0 keeps the small model's size. Added tokens have logit 0, so no greedy text has them."""


MODEST = Shape(hidden=896, layers=18, heads=14, kv_heads=2, intermediate=2432)
"""154 M parameters: drafting saves time at this size, and the checkpoint is made in seconds."""


def grown_config(old: Any, shape: Shape, dtype: torch.dtype) -> LlamaConfig:
    """Return the grown model's configuration, from the small model's configuration.

    Raises ValueError for a shape that cannot hold the small model or that transformers refuses.
    """
    vocab_size = shape.vocab_size or old.vocab_size
    grown = (shape.hidden, shape.layers, shape.intermediate, vocab_size)
    small = (old.hidden_size, old.num_hidden_layers, old.intermediate_size, old.vocab_size)
    if any(size < least for size, least in zip(grown, small, strict=True)):
        raise ValueError("the grown model must be at least as large as the small one")
    if shape.kv_heads < old.num_key_value_heads or shape.heads // shape.kv_heads < _group(old):
        raise ValueError("a key/value head needs as many query heads as in the small model")
    if shape.hidden % shape.heads:
        raise ValueError("the hidden size must be a multiple of the number of heads")
    return LlamaConfig(
        **{
            **old.to_dict(),
            "hidden_size": shape.hidden,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "intermediate_size": shape.intermediate,
            "vocab_size": vocab_size,
            "rms_norm_eps": old.rms_norm_eps * old.hidden_size / shape.hidden,
            "dtype": str(dtype).removeprefix("torch."),
        }
    )


def grow(small: Any, shape: Shape, dtype: torch.dtype) -> Any:
    """Return the grown model. Raises ValueError for shapes that `grown_config` refuses."""
    old = small.config
    config = grown_config(old, shape, dtype)
    # The meta device allocates nothing, so each tensor exists only once, in its final form.
    with torch.device("meta"):
        large: Any = LlamaForCausalLM(config)
    source = small.state_dict()
    rows = _Rows(old.head_dim, old.num_key_value_heads, _group(old), _group(config))
    noise = (torch.randn(_NOISE_COUNT, generator=torch.Generator().manual_seed(0)) * 0.02).to(dtype)
    state = {
        name: _grown(name, tensor.shape, source, rows, noise)
        for name, tensor in large.state_dict().items()
    }
    large.load_state_dict(state, assign=True)
    large.tie_weights()
    # The buffers of the rotary embedding are not in the state dict.
    large.model.rotary_emb = type(large.model.rotary_emb)(config)
    large.generation_config = small.generation_config
    large.train(False)
    return large


def _group(config: Any) -> int:
    """Return the number of query heads per key/value head."""
    return int(config.num_attention_heads // config.num_key_value_heads)


class _Rows:
    """The rows of the large model's projections that hold the small model's attention heads."""

    def __init__(self, head_size: int, kv_heads: int, old_group: int, group: int) -> None:
        lanes = torch.arange(head_size)
        self.query = torch.cat(
            [lanes + head_size * (k * group + j) for k in range(kv_heads) for j in range(old_group)]
        )
        self.key = torch.arange(head_size * kv_heads)


def _grown(
    name: str, shape: torch.Size, source: dict[str, torch.Tensor], rows: _Rows, noise: torch.Tensor
) -> torch.Tensor:
    """Return one tensor of the large model, in the dtype of `noise`."""
    part = source.get(name)
    if name.endswith("norm.weight"):
        out = torch.ones(shape, dtype=noise.dtype)
        if part is not None:
            out[: part.numel()] = part * math.sqrt(part.numel() / shape[0])
        return out
    writes = any(kind in name for kind in ("embed_tokens", "lm_head", "o_proj", "down_proj"))
    out = torch.zeros(shape, dtype=noise.dtype) if writes else _repeated(noise, shape)
    if part is None:
        return out
    part = part.to(out.dtype)
    if "o_proj" in name:
        out[: part.shape[0], rows.query] = part
    elif "q_proj" in name:
        out[rows.query, : part.shape[1]] = part
    elif "k_proj" in name or "v_proj" in name:
        out[rows.key, : part.shape[1]] = part
    else:
        out[: part.shape[0], : part.shape[1]] = part
    return out


def _repeated(noise: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return a tensor of this shape filled with repeated `noise`."""
    out = torch.empty(shape, dtype=noise.dtype)
    flat = out.view(-1)
    count = noise.numel()
    whole = flat.numel() // count * count
    flat[:whole].view(-1, count).copy_(noise)
    flat[whole:].copy_(noise[: flat.numel() - whole])
    return out


def grow_head(head: Path, small: Path, large: Path, out: Path) -> None:
    """Make an EAGLE-3 head for the grown target `large` from `head`, a head for the target `small`.

    The new head reads the first columns of each state, which equal the small target's states. Its
    file has the small target's embeddings. It never guesses the tokens that only the large target
    has. Raises KeyError for a head of another kind.
    """
    config = json.loads((head / "config.json").read_text())
    target = json.loads((large / "config.json").read_text())
    width, more = target["hidden_size"], target["vocab_size"] - config["vocab_size"]
    tensors = load_file(head / "model.safetensors")
    parts = torch.split(tensors["fc.weight"], config["target_hidden_size"], dim=1)
    padded = [torch.nn.functional.pad(part, (0, width - part.shape[1])) for part in parts]
    tensors["fc.weight"] = torch.cat(padded, dim=1)
    with safe_open(small / "model.safetensors", framework="pt") as weights:
        embeddings = weights.get_tensor("model.embed_tokens.weight")
    tensors["embed_tokens.weight"] = torch.nn.functional.pad(embeddings, (0, 0, 0, more))
    tensors["t2d"] = torch.nn.functional.pad(tensors["t2d"], (0, more))
    config |= {"target_hidden_size": width, "vocab_size": target["vocab_size"]}
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "model.safetensors")
    (out / "config.json").write_text(json.dumps(config, indent=1))


def modest_checkpoint(small: Path, out: Path) -> None:
    """Make the checkpoint of shape MODEST in bfloat16 at `out`, unless it is there already.

    The checkpoint is made anew if the small model's weights are newer.
    """
    weights = small / "model.safetensors"
    config = out / "config.json"
    if not config.is_file() or config.stat().st_mtime < weights.stat().st_mtime:
        make_checkpoint(small, out, MODEST, "bfloat16")


def make_checkpoint(small: Path, out: Path, shape: Shape, dtype: str) -> None:
    """Make the grown checkpoint with its tokenizer at `out`, in place of an earlier checkpoint."""
    # The folder is renamed when it is complete: a killed process must not leave half a checkpoint.
    partial = out.with_name(f"{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model = LlamaForCausalLM.from_pretrained(small, dtype=torch.float32)
    AutoTokenizer.from_pretrained(small).save_pretrained(partial)
    grow(model, shape, getattr(torch, dtype)).save_pretrained(partial)
    shutil.rmtree(out, ignore_errors=True)
    partial.rename(out)


def main(small: Path, out: Path) -> None:
    """Run `modest_checkpoint`, and say what it makes, where and how large."""
    print(f"growing {small} to 154 M parameters, which compute the same function", flush=True)
    modest_checkpoint(small, out)
    size = sum(path.stat().st_size for path in out.iterdir())
    print(f"made {out}, {size / 1e6:.0f} MB; it is kept for the next start", flush=True)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
