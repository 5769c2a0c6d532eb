"""The bundled heads guess what the bundled target says."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.heads.loading import load, target_weights
from outrider.heads.model import Extension
from outrider.heads.reading import read
from outrider.tokenizer import load_tokenizer

MODELS = Path(__file__).parents[2] / "models"
TARGET = MODELS / "target"
HEADS = sorted(folder.name for folder in (MODELS / "heads").iterdir())
PROMPT = "def read(path):\n    with open(path) as file:\n        "
LENGTH = 48
COUNT = 3


@cache
def greedy_text() -> tuple[list[int], int, list[torch.Tensor]]:
    """The target's greedy text, the length of its prompt, and its states [tokens, hidden].

    The states are the inputs of its layers, in order, and then that behind the final norm.
    """
    prompt = load_tokenizer(str(TARGET)).encode(PROMPT).ids
    model = LlamaForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    ids = torch.tensor([prompt])
    text = model.generate(ids, max_new_tokens=LENGTH, min_new_tokens=LENGTH, do_sample=False)
    states = model(text, output_hidden_states=True).hidden_states
    return text[0].tolist(), len(prompt), [state[0] for state in states]


@pytest.mark.parametrize("name", HEADS)
@torch.inference_mode()
def test_a_bundled_head_guesses_much_of_a_greedy_text(name: str) -> None:
    text, start, states = greedy_text()
    config = LlamaConfig.from_pretrained(TARGET)
    head = read(MODELS / "heads" / name, config)
    model = load(head, target_weights(TARGET), page_count=16)
    wanted = [*head.spec.boundaries, *[-1] * head.spec.final_state]
    features = torch.cat([states[k] for k in wanted], dim=1)
    right = []
    for length in range(start, len(text) - COUNT):
        sequence = model.open(text[:length])
        model.extend([Extension(sequence, [], features[: length - 1], 0)])
        guessed = model.propose([sequence], COUNT).tokens[0].tolist()
        true = text[length : length + COUNT]
        right.append(next((n for n in range(COUNT) if guessed[n] != true[n]), COUNT))
        model.close(sequence)
    # At random, one in 4,096 of the first guesses would be right. Medusa's guesses know nothing of
    # one another.
    assert sum(right) > (0.4 if name == "medusa" else 1.0) * len(right)
    if name not in ("dflash", "medusa"):
        assert right.count(COUNT) > 0.3 * len(right)
