"""Features that drafters get from vLLM are the target's hidden states, as transformers has them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from tests.vllm.cases import MODEL

ROOT = Path(__file__).parents[2]
HEAD = str(ROOT / "models/heads/eagle3")
SOURCE = Path(torch.nn.functional.__file__).read_text()
TOKENS = 40
# A step reads at most 48 tokens of prompts. With pages of 32 tokens, three texts fill the cache.
SETTINGS = {"max_num_batched_tokens": 48, "num_gpu_blocks_override": 16}


def take(runner: str, groups: list[list[list[int]]], **settings: Any) -> dict[str, Any]:
    """Return what `tests.vllm.take_features` answers."""
    asked = {"head": HEAD, "tokens": TOKENS, "groups": groups, "settings": settings}
    done = subprocess.run(
        [sys.executable, "-m", "tests.vllm.take_features", runner],
        cwd=ROOT,
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow  # The second runner's kernels are interpreted.
@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_features_are_the_targets_hidden_states(runner: str) -> None:
    """Prompts are read in chunks, drafts are rejected, and requests are preempted."""
    ids = Tokenizer.from_file(f"{MODEL}/tokenizer.json").encode(SOURCE[:20_000]).ids
    alone = ids[:100]
    crowd = [ids[start : start + 90 + start % 7] for start in (500, 1000, 1500, 2000)]
    found = take(runner, [[alone], [alone], crowd], enforce_eager=True, **SETTINGS)
    assert found["preempted"] > 0
    assert 0 < found["accepted"] < found["drafted"]
    first, again, crowded = found["groups"]
    assert first[0]["text"] == again[0]["text"]
    for taken in [*first, *again, *crowded]:
        assert taken["error"] < 1e-3
        assert taken["projected_error"] < 1e-3
    for taken in [*first, *crowded]:
        for positions in (taken["positions"], taken["projected_positions"]):
            # Each computed token has its features once. No verdict follows the last step.
            assert positions == [*range(len(positions))]
            assert len(positions) >= 90 + TOKENS - 8
    # The prefix cache has three pages of the prompt.
    assert again[0]["positions"] == [*range(96, first[0]["positions"][-1] + 1)]


@pytest.mark.slow  # vLLM compiles the model.
def test_a_compiled_model_keeps_the_states_that_were_named() -> None:
    ids = Tokenizer.from_file(f"{MODEL}/tokenizer.json").encode(SOURCE[:20_000]).ids
    found = take("v1", [[ids[:60]]], **SETTINGS)
    [[taken]] = found["groups"]
    assert taken["projected_error"] < 1e-3
    assert taken["projected_positions"] == [*range(len(taken["projected_positions"]))]
