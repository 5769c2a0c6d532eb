"""The MTP layer of GLM-4.5, over our paged cache, has the scores of `transformers`' MTP module."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM
from transformers.modeling_layers import MtpModel

from outrider.errors import OutriderError, Reason
from outrider.heads.loading import load, target_weights
from outrider.heads.reading import read
from outrider.lm.runner import ModelRunner, SequenceSlice
from outrider.protocol.draft_messages import FINAL_STATE
from tests.heads.head_scores import scores_of

VOCAB, HIDDEN, LAYERS, EXPERTS, INNER = 40, 32, 3, 4, 12
TEXT = [(7 * i * i + 3 * i) % VOCAB for i in range(24)]
STEPS = 3


def make(**more: Any) -> tuple[Glm4MoeForCausalLM, MtpModel]:
    """Return a small target with random weights, and its MTP module."""
    torch.manual_seed(1)
    config = Glm4MoeConfig(  # type: ignore[call-arg]  # `head_dim` is a field of the type
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        moe_intermediate_size=INNER,
        num_experts_per_tok=2,
        n_routed_experts=EXPERTS,
        pad_token_id=0,
        eos_token_id=1,
        **more,
    )
    target = Glm4MoeForCausalLM(config).eval()
    mtp = MtpModel(target, 1).eval()
    with torch.no_grad():
        for weight in (*target.parameters(), *mtp.layers.parameters(), *mtp.layers.buffers()):
            weight.copy_(torch.randn(weight.shape) * (0.3 if weight.dim() > 1 else 0.5))
    return target, mtp


def write(folder: Path, target: Glm4MoeForCausalLM, mtp: MtpModel) -> Path:
    """Save both like GLM's files: the MTP layer is one more layer, and each expert is separate."""
    target.save_pretrained(folder)
    named = {
        "post_norm.weight": "shared_head.norm.weight",
        **{f"{name}.weight": f"{name}.weight" for name in ("enorm", "hnorm", "eh_proj")},
    }
    found: dict[str, torch.Tensor] = {"embed_tokens.weight": torch.zeros(VOCAB, HIDDEN)}
    for name, tensor in mtp.layers[0].state_dict().items():
        short = name.removeprefix("mtp_block.")
        if short == "mlp.experts.gate_up_proj":
            for i, both in enumerate(tensor):
                gate, up = both.split(INNER)
                found[f"mlp.experts.{i}.gate_proj.weight"] = gate
                found[f"mlp.experts.{i}.up_proj.weight"] = up
        elif short == "mlp.experts.down_proj":
            found |= {f"mlp.experts.{i}.down_proj.weight": one for i, one in enumerate(tensor)}
        else:
            found[named.get(short, short)] = tensor
    tensors = {f"model.layers.{LAYERS}.{name}": t.contiguous() for name, t in found.items()}
    save_file(tensors, folder / "mtp.safetensors")
    return folder


def expected(mtp: MtpModel, features: torch.Tensor, length: int) -> torch.Tensor:
    """Return the scores that the MTP module computes without a cache."""
    states, scores = features[None, : length - 1], []
    for step in range(STEPS):
        rows = length - 1 + step
        out = mtp.forward_layer(
            0, states, torch.arange(rows)[None], None, torch.tensor([TEXT[1 : rows + 1]])
        )
        scores.append(mtp._project_to_logits(out[0, -1:])[0])
        states = torch.cat((states, out[:, -1:]), dim=1)
    return torch.stack(scores)


@pytest.mark.parametrize(
    "more", [{}, {"use_qk_norm": True, "attention_bias": True, "n_group": 2, "topk_group": 1}]
)
@torch.inference_mode()
def test_scores_are_those_of_transformers(tmp_path: Path, more: dict[str, Any]) -> None:
    target, mtp = make(**more)
    folder = write(tmp_path, target, mtp)
    head = read(folder, target.config)
    model = load(head, target_weights(folder), page_count=32, page_size=4)
    features = torch.randn(len(TEXT), HIDDEN)
    lengths = [2, 5, 20]
    found, _ = scores_of(model, TEXT, features, lengths, STEPS)
    wanted = torch.stack([expected(mtp, features, n) for n in lengths])
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    assert found.std() > 0.3


def test_the_router_stays_in_float32(tmp_path: Path) -> None:
    target, mtp = make()
    folder = write(tmp_path, target, mtp)
    model = load(
        read(folder, target.config), target_weights(folder), page_count=8, dtype=torch.bfloat16
    )
    types = {name: tensor.dtype for name, tensor in model.state_dict().items() if "gate" in name}
    router = {name for name, dtype in types.items() if dtype is torch.float32}
    assert router == {
        "layers.0.block.mlp.gate.weight",
        "layers.0.block.mlp.gate.e_score_correction_bias",
    }


@torch.inference_mode()
def test_its_target_is_served_and_has_the_state_that_it_reads(tmp_path: Path) -> None:
    target, mtp = make()
    folder = write(tmp_path, target, mtp)
    runner = ModelRunner.load(str(folder), dtype="float32", device="cpu", page_count=8)
    assert runner.can_watch({FINAL_STATE})
    runner.watch({FINAL_STATE})
    logits = runner.forward([SequenceSlice(TEXT, 0, [0, 1], len(TEXT))])
    state = runner.pick_states([FINAL_STATE], range(len(TEXT)), "float32")
    torch.testing.assert_close(state @ target.lm_head.weight.T, logits, atol=1e-4, rtol=1e-4)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    target, mtp = make()
    folder = write(tmp_path, target, mtp)
    tensors = load_file(folder / "mtp.safetensors")
    del tensors[f"model.layers.{LAYERS}.mlp.experts.2.up_proj.weight"]
    save_file(tensors, folder / "mtp.safetensors")
    with pytest.raises(OutriderError, match=r"the weights mlp\.experts\.2\.up_proj\.weight"):
        read(folder, target.config)


@pytest.mark.parametrize(
    "wrong",
    [
        {"use_cache": "x"},
        {"dtype": [1]},
        {"hidden_act": "none"},
        {"head_dim": math.inf},
        {"rope_parameters": {"rope_type": "default", "rope_theta": "x"}},
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 1e12,
            }
        },
    ],
    ids=str,
)
def test_a_wrong_value_of_its_config_is_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    folder = write(tmp_path, *make())
    read(folder, make()[0].config)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | wrong))
    with pytest.raises(OutriderError) as caught:
        read(folder, make()[0].config)
    assert caught.value.reason is Reason.INVALID_VALUE
    assert str(folder) in caught.value.message
    assert "\n" not in caught.value.message
