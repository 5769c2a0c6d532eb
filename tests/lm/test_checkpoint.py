"""A checkpoint is served only if its files have each weight of the model, under its right name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import DeepseekV3Config, Qwen3MoeConfig

from outrider.errors import OutriderError
from outrider.lm.checkpoint import read_checkpoint
from outrider.lm.runner import ModelRunner
from tests.lm.tiny_models import CONFIGS, VOCAB_SIZE, build

Tensors = dict[str, torch.Tensor]
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 16,
    "intermediate_size": 24,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
}
MODELS = {
    "llama": CONFIGS["llama"],
    "tied": CONFIGS["gemma3, alternating windows"],
    "gpt2": CONFIGS["gpt2, learned positions"],
    "experts": Qwen3MoeConfig(**_SIZES, num_experts=3),
    "latent attention": DeepseekV3Config(
        **_SIZES,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    ),
}


def save(name: str, folder: Path) -> Tensors:
    """Save a model in one file; return its tensors."""
    build(MODELS[name]).save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def write(folder: Path, tensors: Tensors, **config: Any) -> None:
    """Put other tensors, and other keys of the configuration, in place of the model's."""
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))


def refusal(folder: Path) -> str:
    """Return the error that refuses the folder, in one line; "" if the model is served."""
    try:
        read_checkpoint(str(folder), "float32", trust_remote_code=False)
    except OutriderError as error:
        return f"{error.reason.name} {error.field}: {error.message}"
    return ""


@pytest.mark.parametrize("name", MODELS)
def test_every_weight_is_missed_by_its_name_if_the_files_lack_it(name: str, tmp_path: Path) -> None:
    tensors = save(name, tmp_path)
    assert refusal(tmp_path) == ""
    # One layer is tested in place of all.
    for missing in (name for name in tensors if not {"0", "2"} & set(name.split(".")[:3])):
        write(tmp_path, {key: each for key, each in tensors.items() if key != missing})
        message = refusal(tmp_path)
        # `transformers` joins the experts of a layer, and cannot name the missing expert.
        assert message if ".experts." in missing else missing in message, missing


def test_every_weight_is_missed_that_an_index_leaves_out(tmp_path: Path) -> None:
    build(MODELS["llama"]).save_pretrained(tmp_path, max_shard_size="8KB")
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    files = index["weight_map"]
    assert len(set(files.values())) > 2
    assert refusal(tmp_path) == ""
    last = max(files.values())
    kept = {name: file for name, file in files.items() if file != last}
    path.write_text(json.dumps(index | {"weight_map": kept}))
    assert all(name in refusal(tmp_path) for name in set(files) - set(kept))


def _prefixed(tensors: Tensors) -> Tensors:
    return {f"base_model.model.{name}": each for name, each in tensors.items()}


def _with_other_names(tensors: Tensors) -> Tensors:
    return {name.replace("1.mlp", "1.ffn"): each for name, each in tensors.items()}


def _with_a_bias(tensors: Tensors) -> Tensors:
    return tensors | {"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}


def _with_a_biased_head(tensors: Tensors) -> Tensors:
    return tensors | {"lm_head.bias": torch.ones(VOCAB_SIZE)}


def _decoder_alone(tensors: Tensors) -> Tensors:
    names = {name: name.removeprefix("model.") for name in tensors if name != "lm_head.weight"}
    return {new: tensors[name] for name, new in names.items()}


@pytest.mark.parametrize(
    ("change", "config", "named"),
    [
        (_prefixed, {}, "lack 30 of its weights (lm_head.weight, model.embed_tokens.weight"),
        (_prefixed, {}, "no place for 30 of its weights (base_model.model.lm_head.weight"),
        (_with_other_names, {}, "lack 3 of its weights (model.layers.1.mlp.down_proj.weight"),
        (dict, {"num_hidden_layers": 4}, "lack 9 of its weights (model.layers.3.input_layernorm"),
        (dict, {"num_hidden_layers": 2}, "no place for 9 of its weights (model.layers.2.input"),
        (_decoder_alone, {"num_hidden_layers": 2}, "no place for 9 of its weights (layers.2.inp"),
        (_decoder_alone, {}, "lack 1 of its weights (lm_head.weight)"),
        (_with_a_bias, {}, "1 of its weights (model.layers.0.self_attn.q_proj.bias)"),
        (_with_a_biased_head, {}, "no place for 1 of its weights (lm_head.bias)"),
        (
            dict,
            {"vocab_size": 99},
            "other shapes of 2 of its weights (lm_head.weight [97, 32]",
        ),
        (dict, {"intermediate_size": 50}, "other shapes of 9 of its weights"),
    ],
)
def test_weights_of_another_configuration_are_refused_by_name(
    change: Callable[[Tensors], Tensors], config: dict[str, Any], named: str, tmp_path: Path
) -> None:
    write(tmp_path, change(save("llama", tmp_path)), **config)
    message = refusal(tmp_path)
    assert message.startswith(f"INVALID_VALUE model: {tmp_path} cannot be served: ")
    assert named in message


def test_an_expert_more_or_fewer_is_refused(tmp_path: Path) -> None:
    tensors = save("experts", tmp_path)
    for count in (2, 4):
        write(tmp_path, tensors, num_local_experts=count)
        assert "model.layers.0.mlp.experts" in refusal(tmp_path)


_BESIDE = {
    "a table of the rotary embedding": ["model.layers.0.self_attn.rotary_emb.inv_freq"],
    "a vision tower": ["vision_tower.layers.0.norm.weight", "model.visual.blocks.1.norm.weight"],
    "a projector": ["model.multi_modal_projector.linear_1.weight"],
    "a value head": ["v_head.summary.weight"],
    "MTP as in Qwen's files": ["mtp.fc.weight", "mtp.layers.0.mlp.up_proj.weight"],
    "MTP as in MiMo's files": ["model.mtp_layers.0.input_proj.weight"],
    "MTP as in DeepSeek's files": [
        "model.layers.3.eh_proj.weight",
        "model.layers.3.mlp.experts.0.up_proj.weight",
        "model.layers.3.shared_head.head.weight",
    ],
}


@pytest.mark.parametrize("what", _BESIDE)
def test_what_lies_beside_the_text_model_is_no_reason_to_refuse(what: str, tmp_path: Path) -> None:
    tensors = save("llama", tmp_path)
    write(tmp_path, tensors | {name: torch.ones(8) for name in _BESIDE[what]})
    assert refusal(tmp_path) == ""


def test_a_tied_matrix_may_be_stored_twice(tmp_path: Path) -> None:
    tensors = save("tied", tmp_path)
    write(tmp_path, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    assert refusal(tmp_path) == ""


def test_the_default_end_of_a_models_type_is_no_end(tmp_path: Path) -> None:
    """LlamaConfig sets the end token 2 if config.json has none."""
    save("llama", tmp_path)
    (tmp_path / "generation_config.json").unlink()
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("eos_token_id", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    Tokenizer(models.WordLevel({"a": 0, "end": 5}, "a")).save(str(tmp_path / "tokenizer.json"))
    named = json.dumps({"eos_token": "end"})
    (tmp_path / "tokenizer_config.json").write_text(named)
    runner = ModelRunner.load(str(tmp_path), dtype="float32", device="cpu", page_count=8)
    assert runner.eos_token_ids == (5,)
