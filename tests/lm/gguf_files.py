"""Writes a tiny Llama with the bundled tokenizer as a GGUF file, as llama.cpp lays it out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quantize
from transformers import LlamaConfig, LlamaForCausalLM

MODELS = Path(__file__).parents[2] / "models"
END = "<|end|>"
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}<|assistant|>"
HEADS, KEY_HEADS = 4, 2
_OF_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_OF_MODEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def tiny_llama() -> Any:
    """Return a random Llama with the bundled tokenizer's vocabulary."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
    )
    return LlamaForCausalLM(config).eval()


def write_gguf(
    file: Path,
    model: Any,
    *,
    architecture: str = "llama",
    left_out: str = "",
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    shard_tensors: int = 0,
) -> None:
    """Write the model, without the tensor `left_out`; in shards if `shard_tensors` is not 0.

    Matrices have the type `kind`, and vectors are float32. A shard has `shard_tensors` tensors.
    """
    config = model.config
    writer = GGUFWriter(file, architecture, split_max_tensors=shard_tensors)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_HEADS)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(config.vocab_size)
    _add_tokenizer(writer)
    for name, values in _tensors(model).items():
        if name == left_out:
            continue
        of_kind = kind if values.ndim > 1 else GGMLQuantizationType.F32
        writer.add_tensor(name, quantize(values, of_kind), raw_dtype=of_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(model: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Return the model's weights, keyed by their names in GGUF."""
    state = {name: values.float().numpy() for name, values in model.state_dict().items()}
    found = {f"{ours}.weight": state[f"{theirs}.weight"] for ours, theirs in _OF_MODEL.items()}
    for i in range(model.config.num_hidden_layers):
        for ours, theirs in _OF_LAYER.items():
            values = state[f"model.layers.{i}.{theirs}.weight"]
            heads = {"attn_q": HEADS, "attn_k": KEY_HEADS}.get(ours)
            found[f"blk.{i}.{ours}.weight"] = values if heads is None else _in_pairs(values, heads)
    return found


def _in_pairs(values: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Reorder a projection's rows so that the two numbers of a rotation are neighbours."""
    out, width = values.shape
    return values.reshape(heads, 2, out // heads // 2, width).swapaxes(1, 2).reshape(out, width)


def _add_tokenizer(writer: GGUFWriter) -> None:
    tokenizer = json.loads((MODELS / "target" / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"] | {
        each["content"]: each["id"] for each in tokenizer["added_tokens"]
    }
    special = {each["content"] for each in tokenizer["added_tokens"]}
    tokens = sorted(vocabulary, key=vocabulary.get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(vocabulary[END])
    writer.add_bos_token_id(vocabulary["<|endoftext|>"])
    writer.add_chat_template(TEMPLATE)
