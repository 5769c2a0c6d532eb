"""A seed gives the same text on our engine and on both runners of vLLM, whatever the drafter.

The engines compute in float32: their logits are so close that no draw differs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from outrider.lm.pages import PagePool
from outrider.lm.runner import ModelRunner
from outrider.protocol.messages import TokenChunk
from tests.vllm.cases import MODEL, Case, seed_of
from verifier_svc.engine.loop import Engine
from verifier_svc.engine.outbox import Delivery
from verifier_svc.metrics import VerifierMetrics

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

ALL = {
    "temperature": 0.9,
    "top_k": 200,
    "top_p": 0.95,
    "min_p": 0.01,
    "typical_p": 0.97,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.3,
}
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.2, "top_k": 40},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.9, "min_p": 0.05},
    {"temperature": 1.1, "typical_p": 0.8},
    {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"temperature": 0.7, "frequency_penalty": 0.6, "presence_penalty": -0.3},
    ALL,
]
ROOT = Path(__file__).parents[2]
SOURCE = Path(torch.nn.functional.__file__).read_text()


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    """Return requests that together use all settings."""
    ids = Tokenizer.from_file(f"{MODEL}/tokenizer.json").encode(SOURCE[:100_000]).ids
    # From the second kind of draft on, vLLM's cache has 32 of the first prompt's 33 tokens. One
    # token is left to compute, so vLLM pads the row of this prompt's request with draft ids of -1.
    prompts = [ids[:33]]
    prompts += [ids[start : start + 40 + start % 7] for start in range(100, 20_000, 997)]
    found = [Case(prompt, dict(each)) for prompt, each in zip(prompts, SETTINGS, strict=False)]
    likely = ids[500:600:5]
    adjusted = {
        **ALL,
        "logit_bias": [[token, 2.0 + i / 7] for i, token in enumerate(dict.fromkeys(likely))],
        "banned_token_ids": ids[700:720],
    }
    found.append(Case(prompts[10], adjusted))
    # Ends early, but not before 9 tokens.
    ended = {"temperature": 0.6, "min_tokens": 9}
    found.append(Case(prompts[11], ended, stop_token_ids=sorted(set(ids[:400]))[:60]))
    # Tokens that were committed earlier count as output.
    continued = {**adjusted, "min_tokens": 12}
    committed = ids[900:907]
    stops = sorted(set(likely).difference(committed))
    found.append(Case(prompts[12], continued, stops, committed))
    return found


def deliver(deliveries: list[Delivery]) -> None:
    for sink, argument in deliveries:
        sink(argument)


@pytest.fixture(scope="module")
def texts(cases: Sequence[Case]) -> list[list[int]]:
    """Return the texts that our engine writes."""
    runner = ModelRunner.load(MODEL, dtype="float32", device="cpu", page_count=256, threads=1)
    found: list[list[int]] = []
    engine = Engine(
        runner,
        PagePool(runner.page_count, runner.page_size),
        deliver,
        VerifierMetrics("target"),
    )
    for number, case in enumerate(cases, 1):
        text: list[int] = []
        found.append(text)

        def take(chunk: object, text: list[int] = text) -> None:
            assert isinstance(chunk, TokenChunk), chunk
            text += chunk.token_ids

        engine.submit(case.request(seed_of(number)), take)
    while engine.sequences:
        engine.step()
    return found


def write(
    runner: str, cases: Sequence[Case], texts: list[list[int]], kinds: list[str], **settings: Any
) -> dict[str, Any]:
    """Return the texts that vLLM writes with each kind of draft, and counts of the drafts."""
    asked = {
        "cases": [asdict(case) for case in cases],
        "texts": texts,
        "kinds": kinds,
        "settings": settings,
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.vllm.write_texts", runner],
        cwd=ROOT,
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_a_seed_gives_the_text_of_our_own_engine_with_any_drafts(
    runner: str, cases: list[Case], texts: list[list[int]]
) -> None:
    assert len(texts[-2]) < 24, "no text ended by itself"
    written = write(runner, cases, texts, ["none", "wrong", "right", "ragged"])
    for kind, found in written.items():
        assert found["texts"] == texts, kind
    assert written["none"]["drafted"] == 0
    assert written["wrong"]["padded"] > 0
    assert written["wrong"]["drafted"] > 100
    assert written["wrong"]["accepted"] == 0
    assert written["right"]["accepted"] == written["right"]["drafted"] > 100
    assert 0 < written["ragged"]["accepted"] < written["ragged"]["drafted"]


def test_two_ranks_write_the_same_text(cases: list[Case], texts: list[list[int]]) -> None:
    written = write("v1", cases, texts, ["none", "ragged"], tensor_parallel_size=2)
    assert [found["texts"] for found in written.values()] == [texts, texts]
