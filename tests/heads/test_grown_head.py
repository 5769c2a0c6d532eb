"""A head that is grown together with its small target makes the same guesses as before."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

from outrider.heads.loading import load, target_weights
from outrider.heads.model import Extension
from outrider.heads.reading import read
from outrider_bench.grow import Shape, grow, grow_head
from tests.heads.head_files import TARGET_HIDDEN, VOCAB, eagle3_specforge, write
from tests.heads.random_target import target

GROWN = Shape(hidden=48, layers=12, heads=6, kv_heads=2, intermediate=64, vocab_size=64)


def write_head(folder: Path) -> None:
    """Write a head whose file names the layers of the target that it reads."""
    config, tensors = eagle3_specforge()
    write(folder, (config | {"target_hidden_size": TARGET_HIDDEN}, tensors))


@torch.inference_mode()
def guesses(head: Path, target: Path, text: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the head's guesses after a text, and their probabilities.

    The target computes the features.
    """
    model = LlamaForCausalLM.from_pretrained(target)
    found = read(head, model.config)
    states = model(torch.tensor([text]), output_hidden_states=True).hidden_states
    features = torch.cat([states[k][0, :-1] for k in found.spec.aux_layers], dim=1)
    drafting = load(found, target_weights(target), page_count=8)
    sequence = drafting.open(text)
    drafting.extend([Extension(sequence, [], features, 0)])
    proposal = drafting.propose([sequence], 5, width=3)
    return proposal.tokens, proposal.shares


def test_a_grown_head_guesses_as_the_small_one(tmp_path: Path) -> None:
    small = target()
    small.save_pretrained(tmp_path / "small")
    grow(small, GROWN, torch.float32).save_pretrained(tmp_path / "large")
    write_head(tmp_path / "head")
    grow_head(tmp_path / "head", tmp_path / "small", tmp_path / "large", tmp_path / "grown")
    text = [(7 * i * i + 3) % VOCAB for i in range(20)]
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
