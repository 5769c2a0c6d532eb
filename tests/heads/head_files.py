"""Writes small heads of random weights in every dialect that the loader reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file

HIDDEN, TARGET_HIDDEN, VOCAB, DRAFT_VOCAB, LAYERS, CONTEXT = 16, 16, 40, 24, 10, 128
# If the C library is built, it computes the attention of heads with 16 channels.
HEADS, KV_HEADS, HEAD_SIZE, INTERMEDIATE = 4, 2, 16, 24
RANK, BLOCK, MASK = 4, 5, 7

Config = dict[str, Any]
Tensors = dict[str, torch.Tensor]
Files = tuple[Config, Tensors]


class Target(SimpleNamespace):
    """The configuration of a target, as `transformers` has it."""

    def get_text_config(self, decoder: bool) -> Target:
        return self


TARGET = Target(
    hidden_size=TARGET_HIDDEN,
    num_hidden_layers=LAYERS,
    vocab_size=VOCAB,
    max_position_embeddings=CONTEXT,
)
SIZES: Config = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_SIZE,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "max_position_embeddings": 32,
    "model_type": "llama",
}
# These weights have a generator of their own, since threads that load models draw from torch's.
_RANDOM = torch.Generator()
_NEW_ROPE: Config = {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}
# A proxy, so that no test can change the values of other tests.
TOP_LEVEL = MappingProxyType(
    {key: value for key, value in SIZES.items() if key != "rope_theta"} | _NEW_ROPE
)


def write(folder: Path, files: Files) -> Path:
    """Write config.json and model.safetensors into a new folder; return the folder."""
    config, tensors = files
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({key: value.contiguous() for key, value in tensors.items()}, folder / MODEL)
    return folder


MODEL = "model.safetensors"


def _randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=_RANDOM)


def layer_tensors(
    index: int = 0, inputs: int = HIDDEN, *, norms: bool = False, input_norm: bool = True
) -> Tensors:
    """Return random weights of one layer; with `norms`, queries and keys have norms."""
    layer = f"layers.{index}."
    queries, keys = HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE
    tensors = {
        f"{layer}self_attn.q_proj.weight": _randn(queries, inputs) / 4,
        f"{layer}self_attn.k_proj.weight": _randn(keys, inputs) / 4,
        f"{layer}self_attn.v_proj.weight": _randn(keys, inputs) / 4,
        f"{layer}self_attn.o_proj.weight": _randn(HIDDEN, queries) / 4,
        f"{layer}mlp.gate_proj.weight": _randn(INTERMEDIATE, HIDDEN) / 4,
        f"{layer}mlp.up_proj.weight": _randn(INTERMEDIATE, HIDDEN) / 4,
        f"{layer}mlp.down_proj.weight": _randn(HIDDEN, INTERMEDIATE) / 4,
        f"{layer}post_attention_layernorm.weight": 1 + _randn(HIDDEN) / 4,
    }
    if input_norm:
        tensors[f"{layer}input_layernorm.weight"] = 1 + _randn(HIDDEN) / 4
    if norms:
        tensors[f"{layer}self_attn.q_norm.weight"] = 1 + _randn(HEAD_SIZE) / 4
        tensors[f"{layer}self_attn.k_norm.weight"] = 1 + _randn(HEAD_SIZE) / 4
    return tensors


def vocabulary() -> Tensors:
    """Return lm_head of a reduced vocabulary, and the maps in both directions."""
    ids = torch.randperm(VOCAB, generator=_RANDOM)[:DRAFT_VOCAB].sort().values
    members = torch.zeros(VOCAB, dtype=torch.bool)
    members[ids] = True
    return {
        "lm_head.weight": _randn(DRAFT_VOCAB, HIDDEN) / 4,
        "d2t": ids - torch.arange(DRAFT_VOCAB),
        "t2d": members,
    }


def _renamed(tensors: Tensors, old: str, new: str) -> Tensors:
    return {key.replace(old, new): value for key, value in tensors.items()}


def eagle3_tensors(seed: int = 1) -> Tensors:
    """Return an EAGLE-3 head under the names of speculators."""
    _RANDOM.manual_seed(seed)
    return {
        "fc.weight": _randn(HIDDEN, 3 * TARGET_HIDDEN) / 4,
        **layer_tensors(inputs=2 * HIDDEN),
        "layers.0.hidden_norm.weight": 1 + _randn(HIDDEN) / 4,
        "norm.weight": 1 + _randn(HIDDEN) / 4,
        **vocabulary(),
    }


def eagle3_safeailab() -> Files:
    config = SIZES | {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": DRAFT_VOCAB}
    return config, _renamed(eagle3_tensors(), "layers.0.", "midlayer.")


def eagle3_specforge() -> Files:
    config = TOP_LEVEL | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": DRAFT_VOCAB,
        "norm_output": True,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4, 6]},
    }
    return config, _renamed(eagle3_tensors(), "layers.0.", "midlayer.")


def eagle3_angelslim() -> Files:
    config = SIZES | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": DRAFT_VOCAB,
        "target_hidden_size": TARGET_HIDDEN,
        "tie_word_embeddings": False,
    }
    return config, _renamed(eagle3_tensors(), "layers.0.", "midlayer.")


def eagle3_modelopt() -> Files:
    config = SIZES | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": DRAFT_VOCAB,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [1, 4, 6],
            "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True,
            "use_mtp_layernorm": False,
            "next_layer_regular": True,
            "parallel_draft_step": 1,
        },
    }
    return config, eagle3_tensors()


def eagle3_speculators() -> Files:
    config = {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": DRAFT_VOCAB,
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": [2, 5, 7],
        "transformer_layer_config": dict(TOP_LEVEL),
    }
    return config, eagle3_tensors()


def eagle3_deepspec() -> Files:
    config = SIZES | {
        "architectures": ["Eagle3Qwen3ForCausalLM"],
        "draft_vocab_size": DRAFT_VOCAB,
        "target_layer_ids": [1, 4, 6],
    }
    tensors = eagle3_tensors()
    maps = ("d2t", "t2d")
    return config, {k if k in maps else f"model.{k}": v for k, v in tensors.items()}


def peagle_tensors() -> Tensors:
    tensors = eagle3_tensors(2)
    hidden = _randn(1, 1, 3 * TARGET_HIDDEN)
    embeddings = _randn(VOCAB, HIDDEN)
    more = layer_tensors(1)
    return tensors | more | {"mask_hidden": hidden, "embed_tokens.weight": embeddings}


def peagle_speculators() -> Files:
    config = eagle3_speculators()[0]
    del config["norm_before_residual"]
    layer = config["transformer_layer_config"] | {"num_hidden_layers": 2}
    names = {"speculators_model_type": "peagle", "architectures": ["PEagleSpeculator"]}
    more = {"mask_token_id": MASK, "transformer_layer_config": layer}
    return config | names | more, peagle_tensors()


def peagle_vllm() -> Files:
    config = SIZES | {
        "architectures": ["PeagleLlamaForCausalLM"],
        "num_hidden_layers": 2,
        "draft_vocab_size": DRAFT_VOCAB,
        "ptd_token_id": MASK,
    }
    return config, peagle_tensors()


def eagle_tensors() -> Tensors:
    _RANDOM.manual_seed(3)
    return {
        "fc.weight": _randn(HIDDEN, 2 * HIDDEN) / 4,
        "fc.bias": _randn(HIDDEN) / 4,
        **layer_tensors(input_norm=False),
    }


def eagle_safeailab() -> Files:
    return SIZES | {"architectures": ["LlamaForCausalLM"]}, eagle_tensors()


def eagle_vllm() -> Files:
    config = TOP_LEVEL | {"architectures": ["EagleLlamaForCausalLM"], "bias": True}
    return config, {f"model.{key}": value for key, value in eagle_tensors().items()}


def block_tensors() -> Tensors:
    """Return a DFlash backbone with Qwen3's norms of queries and keys."""
    _RANDOM.manual_seed(4)
    return {
        "fc.weight": _randn(HIDDEN, 3 * TARGET_HIDDEN) / 4,
        "hidden_norm.weight": 1 + _randn(HIDDEN) / 4,
        "norm.weight": 1 + _randn(HIDDEN) / 4,
        **layer_tensors(0, norms=True),
        **layer_tensors(1, norms=True),
    }


_TWO: Config = {"num_hidden_layers": 2, "model_type": "qwen3", "block_size": BLOCK}


def dflash_zlab() -> Files:
    config = (
        SIZES
        | _TWO
        | {
            "architectures": ["DFlashDraftModel"],
            "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [1, 4, 6]},
        }
    )
    return config, block_tensors()


def dflash_speculators() -> Files:
    config = {
        "speculators_model_type": "dflash",
        "architectures": ["DFlashSpeculator"],
        "aux_hidden_state_layer_ids": [2, 5, 7],
        "mask_token_id": MASK,
        "block_size": BLOCK,
        "draft_vocab_size": VOCAB,
        "transformer_layer_config": TOP_LEVEL | {"num_hidden_layers": 2, "model_type": "qwen3"},
    }
    return config, block_tensors()


def dspark_tensors() -> Tensors:
    tensors = block_tensors()
    return tensors | {
        "markov_head.markov_w1.weight": _randn(VOCAB, RANK) / 2,
        "markov_head.markov_w2.weight": _randn(VOCAB, RANK) / 2,
        "confidence_head.proj.weight": _randn(1, HIDDEN + RANK) / 4,
        "confidence_head.proj.bias": _randn(1) / 4,
    }


_MARKOV: Config = {
    "markov_rank": RANK,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}


def dspark_deepspec() -> Files:
    config = (
        SIZES
        | _TWO
        | _MARKOV
        | {
            "architectures": ["Qwen3DSparkModel"],
            "mask_token_id": MASK,
            "target_layer_ids": [1, 4, 6],
        }
    )
    return config, dspark_tensors()


def dspark_specforge() -> Files:
    own = {"projector_type": "dspark", "mask_token_id": MASK, "target_layer_ids": [1, 4, 6]}
    config = (
        SIZES
        | _TWO
        | {
            "architectures": ["DSparkDraftModel"],
            "auto_map": {"AutoModel": "dspark.DSparkDraftModel"},
            "dflash_config": own | _MARKOV,
        }
    )
    return config, dspark_tensors()


def dspark_modelopt() -> Files:
    config, tensors = dspark_deepspec()
    config["use_confidence_head"] = config.pop("enable_confidence_head")
    flat = _renamed(_renamed(tensors, "markov_head.", ""), "confidence_head.", "confidence_")
    flat["markov_w1"] = flat.pop("markov_w1.weight")
    return config, flat


def dspark_speculators() -> Files:
    config = dflash_speculators()[0] | _MARKOV | {"sample_from_anchor": True}
    names = {"speculators_model_type": "dspark", "architectures": ["DSparkSpeculator"]}
    return config | names, dspark_tensors()


def mtp_mimo() -> Files:
    """Return the files of a target with an MTP layer; a real target has further weights too."""
    _RANDOM.manual_seed(5)
    inside = {
        "token_layernorm.weight": 1 + _randn(HIDDEN) / 4,
        "hidden_layernorm.weight": 1 + _randn(HIDDEN) / 4,
        "final_layernorm.weight": 1 + _randn(HIDDEN) / 4,
        "input_proj.weight": _randn(HIDDEN, 2 * HIDDEN) / 4,
        **_renamed(layer_tensors(), "layers.0.", ""),
        "self_attn.q_proj.bias": _randn(HEADS * HEAD_SIZE),
        "self_attn.k_proj.bias": _randn(KV_HEADS * HEAD_SIZE),
        "self_attn.v_proj.bias": _randn(KV_HEADS * HEAD_SIZE),
    }
    config = SIZES | {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "mimo",
        "num_hidden_layers": LAYERS,
        "num_nextn_predict_layers": 1,
    }
    tensors = {f"model.mtp_layers.0.{key}": value for key, value in inside.items()}
    return config, tensors | {"model.embed_tokens.weight": _randn(VOCAB, HIDDEN)}


def medusa_official() -> Files:
    _RANDOM.manual_seed(6)
    tensors: Tensors = {}
    for i in range(3):
        tensors[f"{i}.0.linear.weight"] = _randn(HIDDEN, HIDDEN) / 4
        tensors[f"{i}.0.linear.bias"] = _randn(HIDDEN) / 4
        tensors[f"{i}.1.weight"] = _randn(VOCAB, HIDDEN) / 4
    return {"medusa_num_heads": 2, "medusa_num_layers": 1}, tensors


def medusa_sharing() -> Files:
    config, tensors = medusa_official()
    return config, {k: v for k, v in tensors.items() if not k.endswith(".1.weight")}


def medusa_vllm() -> Files:
    """Return medusa heads under vLLM's names."""
    _, tensors = medusa_official()
    config = {"architectures": ["MedusaModel"], "model_type": "medusa", "num_heads": 3}
    names: dict[str, str] = {}
    for i in range(3):
        names |= {f"{i}.0.linear.{part}": f"blocks.{i}.layers.0.{part}" for part in PARTS}
        names[f"{i}.1.weight"] = f"lm_heads.{i}.weight"
    sizes = {"num_hidden_layers": 1, "hidden_size": HIDDEN, "vocab_size": VOCAB}
    return config | sizes, {names[key]: value for key, value in tensors.items()}


PARTS = ("weight", "bias")


def redrafter_apple() -> Files:
    _RANDOM.manual_seed(7)
    size = 2 * HIDDEN
    config = {
        "architectures": ["Drafter"],
        "model_type": "recurrent_drafting_drafter",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "exit_dim": size,
        "num_draft_layers": 1,
        "num_lookback_tokens": -1,
        "rnn": True,
    }
    tensors = {
        "lm_head.0.linear.weight": _randn(size, size) / 4,
        "lm_head.0.linear.bias": _randn(size) / 4,
        "lm_head.1.weight": _randn(VOCAB, size) / 4,
        "rnn_u.weight": _randn(HIDDEN, HIDDEN) / 4,
        "rnn_u.bias": _randn(HIDDEN) / 4,
        "rnn_w.weight": _randn(HIDDEN, HIDDEN) / 4,
    }
    return config, tensors


def redrafter_adding_up() -> Files:
    """Return a head without recurrent matrices, whose layers are narrower than two states."""
    config, _ = redrafter_apple()
    size = 24
    wide = {
        "input_proj.weight": _randn(size, 2 * HIDDEN) / 4,
        "input_proj.bias": _randn(size) / 4,
        "lm_head.0.linear.weight": _randn(size, size) / 4,
        "lm_head.0.linear.bias": _randn(size) / 4,
        "lm_head.1.weight": _randn(VOCAB, size) / 4,
    }
    return config | {"exit_dim": size, "rnn": False}, wide


# The dialects in which tests write a head of each kind.
DIALECTS: dict[str, dict[str, Callable[[], Files]]] = {
    "eagle3": {
        "speculators": eagle3_speculators,
        "safeailab": eagle3_safeailab,
        "specforge": eagle3_specforge,
        "angelslim": eagle3_angelslim,
        "modelopt": eagle3_modelopt,
        "deepspec": eagle3_deepspec,
    },
    "peagle": {"speculators": peagle_speculators, "vllm": peagle_vllm},
    "eagle": {"safeailab": eagle_safeailab, "vllm": eagle_vllm},
    "dflash": {"zlab": dflash_zlab, "speculators": dflash_speculators},
    "dspark": {
        "deepspec": dspark_deepspec,
        "specforge": dspark_specforge,
        "modelopt": dspark_modelopt,
        "speculators": dspark_speculators,
    },
    "mtp": {"mimo": mtp_mimo},
    "medusa": {"official": medusa_official, "vllm": medusa_vllm},
    "redrafter": {"apple": redrafter_apple},
}
