"""A model's weights on a CPU: packing and copying change where they lie, and what they compute by a last bit at most."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.lm.cpu import weights
from outrider.lm.cpu.weights import JointLinear, PackedLinear, TiledLinear, settle_on_cpu

needs_bfloat16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    reason="this processor multiplies no bfloat16, so nothing is packed on it",
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
    ("packed", "dtype", "tolerance"),
    [
        pytest.param(PackedLinear, torch.bfloat16, 2**-7, marks=needs_bfloat16),
        (TiledLinear, torch.bfloat16, 2**-7),
        (TiledLinear, torch.float32, 1e-6),
    ],
)
def test_weights_in_another_order_give_the_same_logits(
    packed: type[torch.nn.Module],
    dtype: torch.dtype,
    tolerance: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if packed is PackedLinear:
        monkeypatch.setattr(weights, "library", lambda: None)
    model = tiny(dtype)
    expected = logits(model)
    settle_on_cpu(model)
    assert [type(module) for module in model.model.layers[0].mlp.children()][:3] == [
        JointLinear,
        JointLinear,
        packed,
    ]
    assert type(model.lm_head) is packed
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=tolerance)


def test_float32_weights_without_the_library_keep_their_numbers_and_stay_tied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weights, "library", lambda: None)
    model = tiny(torch.float32)
    expected = logits(model)
    settle_on_cpu(model)
    assert not any(isinstance(module, torch.nn.Linear | PackedLinear) for module in model.modules())
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 1, 0), (2, 2, 2)])
def test_layers_that_share_an_input_give_their_own_outputs_in_whatever_order_they_are_called(
    order: tuple[int, ...],
) -> None:
    plain, joint = (tiny(torch.float32).model.layers[0].self_attn for _ in range(2))
    settle_on_cpu(joint)
    names = ("q_proj", "k_proj", "v_proj")
    for x in torch.randn(2, 1, 3, 64):
        for index in order:
            torch.testing.assert_close(
                getattr(joint, names[index])(x), getattr(plain, names[index])(x)
            )


def test_layers_that_share_an_input_let_go_of_it_with_the_last_call() -> None:
    attention = tiny(torch.float32).model.layers[0].self_attn
    settle_on_cpu(attention)
    x = torch.randn(1, 3, 64)
    outputs = [attention.q_proj(x), attention.k_proj(x), attention.v_proj(x)]
    gone = [weakref.ref(tensor) for tensor in (x, *outputs)]
    del x, outputs
    assert [ref() for ref in gone] == [None] * 4


def test_layers_of_different_makes_are_not_joined() -> None:
    attention = tiny(torch.float32).model.layers[0].self_attn
    attention.k_proj = torch.nn.Linear(64, 32, bias=False)
    settle_on_cpu(attention)
    assert not any(isinstance(module, JointLinear) for module in attention.modules())


def test_settled_weights_no_longer_lie_in_the_mapped_file(tmp_path: Path) -> None:
    tiny(torch.float32).save_pretrained(tmp_path)
    model = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    mapped = {parameter.data_ptr() for parameter in model.parameters()}
    settle_on_cpu(model)
    assert not mapped & {parameter.data_ptr() for parameter in model.parameters()}
