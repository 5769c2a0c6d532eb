"""A grown checkpoint is larger and computes the same function."""

import os
import shutil
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider_bench.grow import MODEST, Shape, grow, modest_checkpoint
from outrider_bench.grown import grown_checkpoint

MODELS = Path(__file__).parents[2] / "models"

GROWN = Shape(hidden=96, layers=4, heads=12, kv_heads=4, intermediate=160)


@pytest.fixture(scope="module")
def small() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=100,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    for name, weight in model.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.uniform_(weight, 0.5, 1.5)
        else:
            torch.nn.init.normal_(weight, std=0.3)
    return model.eval()


def test_a_grown_model_is_larger_and_has_the_same_logits(small: Any) -> None:
    large = grow(small, GROWN, torch.float32)
    ids = torch.arange(40).reshape(2, 20)
    with torch.inference_mode():
        expected = small(ids).logits
        logits = large(ids).logits
    assert large.num_parameters() > 3 * small.num_parameters()
    assert expected.std() > 0.1
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_added_tokens_change_no_logit_of_the_others_and_are_never_the_likeliest(small: Any) -> None:
    large = grow(small, replace(GROWN, vocab_size=130), torch.float32)
    ids = torch.arange(40).reshape(2, 20)
    with torch.inference_mode():
        expected = small(ids).logits
        logits = large(ids).logits
    torch.testing.assert_close(logits[..., :100], expected, rtol=1e-4, atol=1e-4)
    assert torch.count_nonzero(logits[..., 100:]) == 0
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


def test_a_grown_model_has_one_dtype_and_no_meta_tensors(small: Any) -> None:
    large = grow(small, GROWN, torch.bfloat16)
    assert {weight.dtype for weight in large.parameters()} == {torch.bfloat16}
    assert {tensor.device.type for tensor in chain(large.parameters(), large.buffers())} == {"cpu"}
    assert large.lm_head.weight is large.model.embed_tokens.weight


def test_a_checkpoint_is_made_once_and_again_after_a_killed_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(model: Any, directory: Path) -> None:
        model.config.save_pretrained(directory)
        raise KeyboardInterrupt

    shape = Shape(hidden=384, layers=7, heads=6, kv_heads=2, intermediate=1152)
    with monkeypatch.context() as patch:
        patch.setattr(LlamaForCausalLM, "save_pretrained", killed)
        with pytest.raises(KeyboardInterrupt):
            grown_checkpoint(MODELS / "draft", tmp_path, shape, "float32")
    made = grown_checkpoint(MODELS / "draft", tmp_path, shape, "float32")
    assert list(tmp_path.iterdir()) == [made]
    names = {path.name for path in made.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", killed)
    assert grown_checkpoint(MODELS / "draft", tmp_path, shape, "float32") == made


def test_the_served_checkpoint_is_made_anew_for_newer_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upgrade may come with another bundled target."""
    small, out = tmp_path / "small", tmp_path / "grown/target-154m"
    shutil.copytree(MODELS / "draft", small)
    made: list[Shape] = []

    def fake(model: Any, shape: Shape, dtype: torch.dtype) -> Any:
        made.append(shape)
        return model

    monkeypatch.setattr("outrider_bench.grow.grow", fake)
    for newer, count in ((False, 1), (False, 1), (True, 2)):
        if newer:
            later = (out / "config.json").stat().st_mtime + 1
            os.utime(small / "model.safetensors", (later, later))
        modest_checkpoint(small, out)
        assert made == [MODEST] * count
    assert list(out.parent.iterdir()) == [out]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hidden": 16}, "small"),
        ({"layers": 1}, "small"),
        ({"intermediate": 32}, "small"),
        ({"heads": 4}, "small"),
        ({"hidden": 100}, "multiple"),
    ],
)
def test_a_shape_that_cannot_hold_the_small_model_is_refused(
    small: Any, change: dict[str, int], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        grow(small, replace(GROWN, **change), torch.float32)
