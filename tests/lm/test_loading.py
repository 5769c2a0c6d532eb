"""The runner loads real models unchanged, and refuses all other models with the reason."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    GptOssConfig,
    MambaConfig,
    Phi3Config,
    Qwen3NextConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from outrider.errors import OutriderError, Reason
from outrider.grammar.tokens import token_bytes
from outrider.lm.runner import ModelRunner, SequenceSlice
from outrider.tokenizer import load_tokenizer
from tests.lm.tiny_models import CONFIGS, VOCAB_SIZE, build

MODELS = Path(__file__).parents[2] / "models"
_SMALL: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_hidden_layers": 2}
_HEADS: dict[str, Any] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
}
_EXPERTS: dict[str, Any] = {"num_local_experts": 2, "num_experts_per_tok": 1}


def save(model: Any, directory: Path, **options: Any) -> str:
    model.save_pretrained(directory, **options)
    return str(directory)


@pytest.mark.parametrize("name", ["target", "draft"])
@pytest.mark.parametrize(
    "prompt",
    [
        '{"name": "Ada", "born": 1815}\n',
        "import os\nimport sys\n\n\nclass",
    ],
)
def test_greedy_decoding_of_bundled_models_equals_generate(name: str, prompt: str) -> None:
    path = str(MODELS / name)
    runner = ModelRunner.load(path, dtype="float32", device="cpu", page_count=16)
    prompt_ids = load_tokenizer(path).encode(prompt).ids
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    prompt_1T = torch.tensor([prompt_ids])
    expected = reference.generate(prompt_1T, max_new_tokens=32, do_sample=False)[0].tolist()
    tokens = list(prompt_ids)
    read = 0
    while len(tokens) < len(expected):
        logits_1V = runner.forward([SequenceSlice(tokens[read:], read, list(range(16)), 1)])
        read = len(tokens)
        tokens.append(int(logits_1V.argmax()))
    assert tokens == expected


def test_on_a_gpu_without_the_kernel_the_cache_leaves_a_part_of_the_free_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """tests/lm/test_gpu_memory.py tests the cache's size if the largest step is measured."""
    runner = ModelRunner(build(CONFIGS["llama"]), page_count=1)
    runner.device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (4 * 2**20, 2**30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    page_bytes = 16 * 3 * 2 * (8 + 8) * 4
    assert runner._default_page_count(None, 0.9) == int(4 * 2**20 * 0.85) // page_bytes


def test_eos_ids_without_a_logit_are_dropped() -> None:
    model = build(CONFIGS["llama"])
    model.generation_config.eos_token_id = [2, VOCAB_SIZE, VOCAB_SIZE + 7]
    assert ModelRunner(model, page_count=1).eos_token_ids == (2,)


def test_longrope_is_served_up_to_the_length_where_it_switches() -> None:
    factors = [1.0] * 4
    rope = {
        "rope_type": "longrope",
        "short_factor": factors,
        "long_factor": factors,
        "rope_theta": 1e4,
    }
    config = Phi3Config(
        **_SMALL,
        **_HEADS,
        max_position_embeddings=512,
        original_max_position_embeddings=128,
        rope_parameters=rope,
        pad_token_id=0,
    )
    assert ModelRunner(build(config), page_count=4).context_length == 128


REFUSED = {
    "linear attention": (
        Qwen3NextConfig(
            **_SMALL | {"num_hidden_layers": 4}, **_HEADS, num_experts=2, num_experts_per_tok=1
        ),
        "do not attend through the attention interface|linear_attention",
    ),
    "state space": (
        MambaConfig(**_SMALL),
        "2 of 2 layers do not attend through the attention interface",
    ),
    "own attention code": (
        BloomConfig(vocab_size=VOCAB_SIZE, hidden_size=32, n_layer=2, n_head=4),
        "2 of 2 layers do not attend",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_would_run_wrongly_is_refused_for(name: str) -> None:
    config, reason = REFUSED[name]
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(OutriderError, match=reason) as error:
        ModelRunner(model, "the-model", page_count=4)
    assert (error.value.reason, error.value.field) == (Reason.INVALID_VALUE, "model")
    assert error.value.message.startswith("the-model cannot be served: ")


def test_an_encoder_decoder_is_refused(tmp_path: Path) -> None:
    config = T5Config(vocab_size=VOCAB_SIZE, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    path = save(T5ForConditionalGeneration(config), tmp_path)
    with pytest.raises(OutriderError, match="it is an encoder-decoder") as error:
        ModelRunner.load(path, device="cpu")
    assert error.value.field == "model"


# The values of FP4 (E2M1); the four bits are the index.
_FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def packed(out: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return random MXFP4 blocks, their scales, and the weight [2, 32, out] that they stand for."""
    blocks = torch.randint(256, (2, out, 1, 16), dtype=torch.uint8)
    scales = torch.randint(122, 126, (2, out, 1), dtype=torch.uint8)
    pairs = torch.stack((_FP4[(blocks & 15).int()], _FP4[(blocks >> 4).int()]), -1)
    weight = pairs.view(2, out, 32) * 2.0 ** (scales.float() - 127)
    return blocks, scales, weight.transpose(1, 2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mxfp4_weights_are_dequantised(tmp_path: Path, dtype: str) -> None:
    """A byte holds two numbers, and every 32 numbers of a row share a scale, a power of two."""
    config = GptOssConfig(**_SMALL, **_HEADS, **_EXPERTS)
    config.intermediate_size = 32
    reference = build(config)
    path = save(reference, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for layer in range(config.num_hidden_layers):
        experts = reference.model.layers[layer].mlp.experts
        for name, out in (("gate_up_proj", 64), ("down_proj", 32)):
            key = f"model.layers.{layer}.mlp.experts.{name}"
            del tensors[key]
            tensors[f"{key}_blocks"], tensors[f"{key}_scales"], weight = packed(out)
            getattr(experts, name).data = weight
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    written = json.loads((tmp_path / "config.json").read_text())
    written["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    (tmp_path / "config.json").write_text(json.dumps(written))
    runner = ModelRunner.load(path, device="cpu", dtype=dtype, page_count=8)
    ids = [5, 9, 3, 30, 7]
    found = runner.forward([SequenceSlice(ids, 0, [0], 5)])
    with torch.inference_mode():
        expected = reference.to(getattr(torch, dtype))(torch.tensor([ids])).logits[0].float()
    near = {"float32": 1e-5, "bfloat16": 0.1}[dtype]
    torch.testing.assert_close(found, expected, rtol=0, atol=near * float(expected.std()))


@pytest.mark.parametrize("method", ["fp8", "of-tomorrow"])
def test_quantised_weights_are_refused_by_name(tmp_path: Path, method: str) -> None:
    path = save(build(CONFIGS["llama"]), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(OutriderError, match=rf"its weights are quantised \({method}\)") as error:
        ModelRunner.load(path, device="cpu")
    assert error.value.reason is Reason.INVALID_VALUE


def test_pickled_weights_are_never_opened(tmp_path: Path) -> None:
    model = build(CONFIGS["llama"])
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(OutriderError, match="safetensors") as error:
        ModelRunner.load(str(tmp_path), device="cpu")
    assert error.value.reason is Reason.MODEL_NOT_FOUND


def test_code_that_comes_with_a_model_does_not_run(tmp_path: Path) -> None:
    path = save(build(CONFIGS["llama"]), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["model_type"] = "evil"
    config["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')")
    with pytest.raises(OutriderError, match="trust_remote_code"):
        ModelRunner.load(path, device="cpu")


def test_no_code_of_a_tokenizer_runs_and_nobody_is_asked_to_run_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Path(__file__).parents[2] / "models/target"
    model = tmp_path / "model"
    shutil.copytree(target, model)
    config = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    (model / "evil.py").write_text("raise SystemExit('ran')")
    asked: list[str] = []

    def agree(text: str) -> str:
        asked.append(text)
        return "y"

    monkeypatch.setattr("builtins.input", agree)
    assert token_bytes(str(model)) == token_bytes(str(target))
    assert asked == []


def test_a_damaged_weight_file_is_named(tmp_path: Path) -> None:
    path = save(build(CONFIGS["llama"]), tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(OutriderError, match=f"cannot load {tmp_path}"):
        ModelRunner.load(path, device="cpu")


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("dtype", "int8", "dtype must be one of auto, float32, bfloat16, float16, not int8"),
        ("device", "abacus", "device must be auto, cpu or cuda:N, not abacus"),
        ("device", "meta", "device must be auto, cpu or cuda:N, not meta"),
        ("device", "cuda:99", "device is cuda:99, but torch finds"),
    ],
)
def test_an_error_names_the_invalid_setting(setting: str, value: str, message: str) -> None:
    with pytest.raises(OutriderError, match=message) as error:
        ModelRunner.load(str(MODELS / "draft"), **{setting: value})
    assert error.value.field == setting
