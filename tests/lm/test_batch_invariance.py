"""Batch invariance on a CPU: a row's logits have the same bits however many rows a forward has.

The models have the sizes of SmolLM2-135M, with fewer layers.
"""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import pytest
import torch
from transformers import (
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
)

from outrider.lm.cpu.weights import optimize_for_cpu
from outrider.lm.runner import ModelRunner, SequenceSlice
from tests.lm.builds import BUILDS, use_build
from tests.lm.tiny_models import build
from tests.tree_paths import path_to

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 512,
}
# The C decoder leaves sliding windows, and activations other than SiLU, to the model's own forward.
CONFIGS = {
    "C decoder": LlamaConfig(**SIZES),
    "own forward": MistralConfig(**SIZES, sliding_window=50),
    "own forward with GELU": LlamaConfig(**SIZES, hidden_act="gelu"),
}
PYTORCHS: dict[str, tuple[PreTrainedConfig, str]] = {
    "no whole tiles": (LlamaConfig(**SIZES | {"intermediate_size": 1411}), "down_proj"),
    "experts": (MixtralConfig(**SIZES | {"intermediate_size": 64}), "products"),
    "no linear layers": (GPT2Config(vocab_size=512, n_embd=64, n_layer=2, n_head=4), "c_attn"),
    "heads of 72": (
        LlamaConfig(**SIZES | {"num_attention_heads": 8, "num_key_value_heads": 4}),
        "attends",
    ),
}
TEXT = 150
CUTS = {
    "one chunk": [TEXT],
    "all but 12": [TEXT - 12, 12],
    "chunks of 16": [16] * 9 + [6],
    "chunks of 33": [33] * 4 + [18],
    "chunks of 48": [48] * 3 + [6],
}
PAGES = list(range(TEXT // 16 + 1))


@pytest.fixture(scope="module", params=BUILDS)
def build_name(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float32], ids=["bf16", "f32"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    wanted: torch.dtype = request.param
    return wanted


@pytest.fixture(scope="module", params=CONFIGS)
def runner(request: pytest.FixtureRequest, build_name: str, dtype: torch.dtype) -> ModelRunner:
    return make_runner(request.param, build_name, dtype)


@cache
def make_runner(name: str, build_name: str, dtype: torch.dtype) -> ModelRunner:
    with pytest.MonkeyPatch.context() as patch:
        use_build(build_name, patch)
        model = build(CONFIGS[name]).to(dtype)
        optimize_for_cpu(model)
        runner = ModelRunner(model, page_count=100)
    assert (runner.decoder is not None) == (name == "C decoder")
    assert runner.rows_may_differ is None
    return runner


def ids(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, SIZES["vocab_size"], (count,), generator=generator).tolist()


def in_chunks(runner: ModelRunner, sizes: list[int]) -> torch.Tensor:
    """Return the logits of all rows of a text that is cut into chunks."""
    tokens = ids(sum(sizes), 1)
    ends = itertools.accumulate(sizes, initial=0)
    return torch.cat(
        [
            runner.forward([SequenceSlice(tokens[start:end], start, PAGES, end - start)]).clone()
            for start, end in itertools.pairwise(ends)
        ]
    )


@cache
def one_by_one(runner: ModelRunner) -> torch.Tensor:
    return in_chunks(runner, [1] * TEXT)


@pytest.mark.parametrize("sizes", CUTS.values(), ids=CUTS.keys())
def test_a_row_has_the_same_bits_however_its_text_is_cut(
    runner: ModelRunner, sizes: list[int]
) -> None:
    assert torch.equal(in_chunks(runner, sizes), one_by_one(runner))


@pytest.mark.parametrize("others", [7, 64])
def test_a_row_has_the_same_bits_beside_any_number_of_rows(
    runner: ModelRunner, others: int
) -> None:
    """The other rows are steps, or drafts, or steps and a prompt with more rows than any draft."""
    expected = one_by_one(runner)[-4:]
    mine = SequenceSlice(ids(TEXT, 1)[-4:], TEXT - 4, PAGES, 4)
    steps = [SequenceSlice([5], 0, [20 + i], 1) for i in range(others)]
    assert torch.equal(runner.forward([mine, *steps])[:4], expected)
    drafts = [SequenceSlice(ids(5, i), 0, [20 + i], 5) for i in range(others)]
    assert torch.equal(runner.forward([*drafts, mine])[-4:], expected)
    prompt = SequenceSlice(ids(100, 2), 0, list(range(10, 17)), 0)
    assert torch.equal(runner.forward([*steps, prompt, mine])[-4:], expected)


def test_a_row_of_a_large_tree_has_the_bits_of_its_path(runner: ModelRunner) -> None:
    """The tree has more than 32 rows."""
    parents = [i // 3 for i in range(45)]
    text, tree = ids(100, 3), ids(45, 4)
    runner.forward([SequenceSlice(text, 0, PAGES, 0)])
    rows = runner.forward([SequenceSlice([7, *tree], 100, PAGES, 46, parents)]).clone()
    for row in (1, 20, 45):
        path = [7, *(tree[i - 1] for i in path_to(row, parents))]
        chain = runner.forward([SequenceSlice(path, 100, PAGES, 1)])
        assert torch.equal(rows[row], chain[0])


@pytest.mark.parametrize(("config", "part"), PYTORCHS.values(), ids=PYTORCHS.keys())
def test_a_model_with_parts_of_pytorch_says_why_its_rows_may_differ(
    config: PreTrainedConfig, part: str
) -> None:
    model = build(config).to(torch.bfloat16)
    optimize_for_cpu(model)
    assert part in str(ModelRunner(model, page_count=100).rows_may_differ)
