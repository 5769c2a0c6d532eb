"""Fixtures: the scripted verifier, and the bundled draft model with its thread and texts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from drafter_svc.families.draft_model import DraftModel
from drafter_svc.families.model import ModelFamily
from outrider.lm.runner import ModelRunner
from outrider.tokenizer import load_tokenizer
from tests.drafter.scripted_drafts import ScriptedVerifier, serving
from tests.family_rig import Rig

MODEL = str(Path(__file__).parents[2] / "models/draft")
TEXTS = [
    "def add(first, second):\n    return first",
    "The list is sorted in place, which means that",
    '{"name": "outrider", "kind": "server", "port":',
    "class Node:\n    def __init__(self, value, children):\n        self.value =",
    "for line in lines:\n    if not line.strip():",
]


@pytest.fixture
async def verifier() -> AsyncIterator[ScriptedVerifier]:
    async with serving(ScriptedVerifier()) as verifier:
        yield verifier


other = verifier
"""A second verifier."""


@pytest.fixture(scope="module")
def thread() -> Iterator[ThreadPoolExecutor]:
    """Yield the draft model's thread."""
    with ThreadPoolExecutor(1) as thread:
        yield thread


@pytest.fixture(scope="module")
def runner(thread: ThreadPoolExecutor) -> ModelRunner:
    return thread.submit(
        ModelRunner.load, MODEL, dtype="float32", device="cpu", threads=1, page_count=512
    ).result()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = load_tokenizer(MODEL)
    return [tokenizer.encode(text).ids for text in TEXTS]


@pytest.fixture
def make(runner: ModelRunner, thread: ThreadPoolExecutor) -> Callable[..., Rig]:
    """Return a function that makes a rig of the draft model.

    The function takes settings of ModelFamily and DraftModel.
    """

    def make(*, vocab_size: int = 0, branch_count: int = 0, **settings: int) -> Rig:
        model = DraftModel(runner, thread, **settings)
        return Rig(ModelFamily(model, vocab_size or runner.vocab_size, branch_count=branch_count))

    return make


@pytest.fixture(scope="module")
def reference() -> Callable[[list[int]], torch.Tensor]:
    """Return a function that computes `transformers`' logits [V] after a text from scratch."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)

    @torch.inference_mode()
    def logits(text: list[int]) -> torch.Tensor:
        last: torch.Tensor = model(torch.tensor([text]), use_cache=False).logits[0, -1]
        return last

    return logits


@pytest.fixture(scope="module")
def greedy(reference: Callable[[list[int]], torch.Tensor]) -> Callable[[list[int], int], list[int]]:
    """Return a function that continues a text greedily by a number of tokens."""

    def generate(text: list[int], count: int) -> list[int]:
        text = list(text)
        for _ in range(count):
            text.append(int(reference(text).argmax()))
        return text[-count:]

    return generate
