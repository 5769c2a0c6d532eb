"""The bundled heads guess their targets' tokens."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.gguf import pretrained
from outrider.heads.loading import load, target_weights
from outrider.heads.model import Extension, HeadModel
from outrider.heads.reading import read
from outrider.tokenizer import load_tokenizer
from tests.smollm2_texts import smollm2

MODELS = Path(__file__).parents[2] / "models"
CODE = "def read(path):\n    with open(path) as file:\n        "
CHAT = "<|im_start|>user\nWhat is the moon?<|im_end|>\n<|im_start|>assistant\n"
LENGTH = 48
COUNT = 3


@cache
def target(name: str) -> tuple[str, str]:
    """Return the folder of a target of bundled heads, and a prompt for it."""
    if name == "bundled":
        return str(MODELS / "target"), CODE
    return pretrained(smollm2()), CHAT


@cache
def greedy_text(name: str) -> tuple[list[int], int, list[torch.Tensor]]:
    """Return the target's greedy text, the length of its prompt, and its states [tokens, hidden].

    The states are the inputs of the layers, in order, and last the state after the final norm.
    """
    folder, asked = target(name)
    prompt = load_tokenizer(folder).encode(asked).ids
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([prompt])
    text = model.generate(ids, max_new_tokens=LENGTH, min_new_tokens=LENGTH, do_sample=False)
    states = model(text, output_hidden_states=True).hidden_states
    return text[0].tolist(), len(prompt), [state[0] for state in states]


def features_of(model: HeadModel, states: list[torch.Tensor]) -> torch.Tensor:
    """Return the features [tokens, feature width] that a head reads."""
    wanted = [*model.spec.aux_layers, *[-1] * model.spec.final_state]
    return torch.cat([states[k] for k in wanted], dim=1).to(model.dtype)


def drafts(
    model: HeadModel, text: list[int], start: int, features: torch.Tensor
) -> Iterator[list[int]]:
    """Yield `COUNT` guesses after the first n tokens of the text, for each n from `start` on."""
    for length in range(start, len(text) - COUNT):
        sequence = model.open(text[:length])
        model.extend([Extension(sequence, [], features[: length - 1], 0)])
        yield model.propose([sequence], COUNT).tokens[0].tolist()
        model.close(sequence)


@pytest.mark.parametrize(
    ("of", "folder", "mean", "whole"),
    [
        ("bundled", "heads/eagle3", 1.0, 0.3),
        ("bundled", "heads/mtp", 1.0, 0.3),
        pytest.param("smollm2", "smollm2/eagle3", 0.5, 0.05, marks=pytest.mark.slow),
        pytest.param("smollm2", "smollm2/mtp", 0.5, 0.05, marks=pytest.mark.slow),
    ],
)
@torch.inference_mode()
def test_a_bundled_head_guesses_much_of_a_greedy_text(
    of: str, folder: str, mean: float, whole: float
) -> None:
    """The mean number of right guesses before a draft's first error is over `mean`.

    The share of drafts without an error is over `whole`.
    """
    text, start, states = greedy_text(of)
    path = target(of)[0]
    head = read(MODELS / folder, LlamaConfig.from_pretrained(path))
    model = load(head, target_weights(path), page_count=16)
    features = features_of(model, states)
    right = []
    for at, guessed in enumerate(drafts(model, text, start, features), start):
        true = text[at : at + COUNT]
        right.append(next((n for n in range(COUNT) if guessed[n] != true[n]), COUNT))
    # By chance, one first guess in thousands would be right.
    assert sum(right) > mean * len(right)
    assert right.count(COUNT) > whole * len(right)


@pytest.mark.parametrize("folder", ["heads/eagle3", "heads/mtp"])
@torch.inference_mode()
def test_a_head_in_int8_mostly_guesses_the_same(folder: str) -> None:
    text, start, states = greedy_text("bundled")
    path = target("bundled")[0]
    head = read(MODELS / folder, LlamaConfig.from_pretrained(path))
    guesses = []
    for int8 in (False, True):
        model: Any = load(
            head, target_weights(path), page_count=16, dtype=torch.bfloat16, int8=int8
        )
        assert model.lm_head.numbers == ("int8" if int8 else "bfloat16")
        # The verifier may compute the projection in the drafter's place, and does so in bfloat16.
        assert model.projection is None or model.projection.fc.numbers == "bfloat16"
        found = drafts(model, text, start, features_of(model, states))
        guesses.append([token for draft in found for token in draft])
    same = sum(one == other for one, other in zip(*guesses, strict=True))
    assert same > 0.9 * len(guesses[0])
