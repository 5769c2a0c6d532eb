"""A head for a small target, grown with that target, makes the same guesses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.heads.loading import load, target_weights
from outrider.heads.model import Extension
from outrider.heads.reading import read
from outrider.launch.grow import Shape, grow, grow_head

H, V, DRAFTED = 32, 90, 40
GROWN = Shape(hidden=96, layers=5, heads=6, kv_heads=2, intermediate=128, vocab_size=128)
CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": H,
    "target_hidden_size": H,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "vocab_size": V,
    "draft_vocab_size": DRAFTED,
    "tie_word_embeddings": False,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
}


def write_head(folder: Path) -> None:
    draw = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw) / shape[-1] ** 0.5

    layer = {
        **{f"self_attn.{name}_proj.weight": random(32, 2 * H) for name in "qkv"},
        "self_attn.o_proj.weight": random(H, 32),
        "mlp.gate_proj.weight": random(48, H),
        "mlp.up_proj.weight": random(48, H),
        "mlp.down_proj.weight": random(H, 48),
        **{
            f"{name}.weight": torch.ones(H)
            for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")
        },
    }
    ids = torch.arange(0, V, 2)[:DRAFTED]
    tensors = {
        **{f"midlayer.{name}": tensor for name, tensor in layer.items()},
        "fc.weight": random(H, 3 * H),
        "norm.weight": torch.ones(H),
        "lm_head.weight": random(DRAFTED, H),
        "d2t": ids - torch.arange(DRAFTED),
        "t2d": torch.zeros(V, dtype=torch.bool).index_fill_(0, ids, True),
    }
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))


@torch.inference_mode()
def guesses(head: Path, target: Path, text: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The head's guesses behind a text whose features the target computes, and their shares."""
    model = LlamaForCausalLM.from_pretrained(target)
    found = read(head, model.config)
    states = model(torch.tensor([text]), output_hidden_states=True).hidden_states
    features = torch.cat([states[k][0, :-1] for k in found.spec.boundaries], dim=1)
    drafting = load(found, target_weights(target), page_count=8)
    sequence = drafting.open(text)
    drafting.extend([Extension(sequence, [], features, 0)])
    proposal = drafting.propose([sequence], 5, width=3)
    return proposal.tokens, proposal.shares


def test_a_grown_head_guesses_as_the_small_one(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=H,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=64,
        tie_word_embeddings=True,
    )
    small = LlamaForCausalLM(config).eval()
    small.save_pretrained(tmp_path / "small")
    grow(small, GROWN, torch.float32).save_pretrained(tmp_path / "large")
    write_head(tmp_path / "head")
    grow_head(tmp_path / "head", tmp_path / "small", tmp_path / "large", tmp_path / "grown")
    text = [(7 * i * i + 3) % V for i in range(20)]
    tokens, shares = guesses(tmp_path / "head", tmp_path / "small", text)
    grown_tokens, grown_shares = guesses(tmp_path / "grown", tmp_path / "large", text)
    assert torch.equal(tokens, grown_tokens)
    torch.testing.assert_close(grown_shares, shares, atol=1e-4, rtol=1e-3)
    assert len(tokens.unique()) > 1
    assert shares.std() > 0.01


def test_a_head_of_another_kind_is_not_grown(tmp_path: Path) -> None:
    write_head(tmp_path / "head")
    save_file({"0.0.linear.weight": torch.ones(2, 2)}, tmp_path / "head/model.safetensors")
    (tmp_path / "large").mkdir()
    (tmp_path / "large/config.json").write_text('{"hidden_size": 96, "vocab_size": 128}')
    with pytest.raises(KeyError, match=r"fc\.weight"):
        grow_head(tmp_path / "head", tmp_path, tmp_path / "large", tmp_path / "grown")
