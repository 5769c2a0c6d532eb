"""Reordering and copying weights on a CPU changes results by a last bit at most."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.lm.cpu import weights
from outrider.lm.cpu.weights import PackedLinear, TiledLinear, optimize_for_cpu
from outrider.lm.fused_linear import FusedLinearPart

needs_bfloat16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    reason="without bfloat16 support in oneDNN nothing is packed",
)


def tiny(dtype: torch.dtype) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        attention_bias=True,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


def logits(model: LlamaForCausalLM) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.arange(20).unsqueeze(0)).logits


@pytest.mark.parametrize(
    ("layer_class", "dtype", "tolerance"),
    [
        pytest.param(PackedLinear, torch.bfloat16, 2**-7, marks=needs_bfloat16),
        (TiledLinear, torch.bfloat16, 2**-7),
        (TiledLinear, torch.float32, 1e-6),
    ],
)
def test_reordered_weights_give_the_same_logits(
    layer_class: type[torch.nn.Module],
    dtype: torch.dtype,
    tolerance: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if layer_class is PackedLinear:
        monkeypatch.setattr(weights, "library", lambda: None)
    model = tiny(dtype)
    expected = logits(model)
    optimize_for_cpu(model)
    classes = [type(module) for module in model.model.layers[0].mlp.children()]
    assert classes[:3] == [FusedLinearPart, FusedLinearPart, layer_class]
    assert type(model.lm_head) is layer_class
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=tolerance)


def test_without_the_library_float32_weights_stay_tied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weights, "library", lambda: None)
    model = tiny(torch.float32)
    expected = logits(model)
    optimize_for_cpu(model)
    assert not any(isinstance(module, torch.nn.Linear | PackedLinear) for module in model.modules())
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 1, 0), (2, 2, 2)])
def test_fused_layers_give_their_own_outputs_in_any_order_of_calls(order: tuple[int, ...]) -> None:
    plain, fused = (tiny(torch.float32).model.layers[0].self_attn for _ in range(2))
    optimize_for_cpu(fused)
    names = ("q_proj", "k_proj", "v_proj")
    for x in torch.randn(2, 1, 3, 64):
        for index in order:
            out = getattr(fused, names[index])(x)
            torch.testing.assert_close(out, getattr(plain, names[index])(x))


def test_fused_layers_free_their_input_with_the_last_call() -> None:
    attention = tiny(torch.float32).model.layers[0].self_attn
    optimize_for_cpu(attention)
    x = torch.randn(1, 3, 64)
    outputs = [attention.q_proj(x), attention.k_proj(x), attention.v_proj(x)]
    gone = [weakref.ref(tensor) for tensor in (x, *outputs)]
    del x, outputs
    assert [ref() for ref in gone] == [None] * 4


def test_optimized_weights_are_copies_outside_the_mapped_file(tmp_path: Path) -> None:
    tiny(torch.float32).save_pretrained(tmp_path)
    model = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    mapped = {parameter.data_ptr() for parameter in model.parameters()}
    optimize_for_cpu(model)
    assert not mapped & {parameter.data_ptr() for parameter in model.parameters()}
