"""Measures forwards of trees beside chains of as many tokens, and moves in the cache.

`python -m outrider_bench.tree_cost` builds a model with random weights on the GPU, because only
shapes matter here. It prints a line of JSON for each cell, with medians in ms. Chains and trees of
a cell take turns, so that a change of the clock rate affects both.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from statistics import median

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.lm.runner import Bounds, ModelRunner, SequenceSlice

BATCHES = (1, 8, 32)
TREE_TOKENS = (7, 15)
TEXT_TOKENS = (500, 4000)
ROUNDS = 50


def measure(
    runner: ModelRunner,
    batches: tuple[int, ...] = BATCHES,
    tree_tokens: tuple[int, ...] = TREE_TOKENS,
    text_tokens: tuple[int, ...] = TEXT_TOKENS,
    rounds: int = ROUNDS,
) -> Iterator[dict[str, float]]:
    """Yield the cost of each cell that fits the cache, in ms."""
    for batch in batches:
        for text in text_tokens:
            for tree in tree_tokens:
                pages_each = -(-(text + 1 + tree) // runner.page_size)
                if batch * pages_each <= runner.page_count:
                    costs = _cell(runner, batch, text, tree, rounds)
                    yield {"batch": batch, "text": text, "draft_tokens": tree, **costs}


def _cell(runner: ModelRunner, batch: int, text: int, tree: int, rounds: int) -> dict[str, float]:
    pages_each = -(-(text + 1 + tree) // runner.page_size)
    # A binary tree, in order of depth.
    branched = [i // 2 for i in range(tree)]
    pages = [[*range(i * pages_each, (i + 1) * pages_each)] for i in range(batch)]

    def slices(parents: list[int]) -> list[SequenceSlice]:
        tokens = [1] * (1 + tree)
        return [SequenceSlice(tokens, text, numbers, 1 + tree, parents) for numbers in pages]

    # Each sequence moves the last two tokens of its tree behind the root.
    first = [i * pages_each * runner.page_size + text + 1 for i in range(batch)]
    sources = [slot + tree - 2 + place for slot in first for place in range(2)]
    targets = [slot + place for slot in first for place in range(2)]
    runs: dict[str, Callable[[], object]] = {
        "chain_ms": lambda: runner.forward(slices([])),
        "tree_ms": lambda: runner.forward(slices(branched)),
        "moves_ms": lambda: runner.move_tokens(sources, targets),
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(_milliseconds(run, runner.device))
    return {name: round(median(values), 3) for name, values in times.items()}


def _milliseconds(run: Callable[[], object], device: torch.device) -> float:
    """Time a call, the work on the device included."""
    started = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1000 * (time.perf_counter() - started)


def _random_model() -> torch.nn.Module:
    """A Llama of 8 B parameters on the GPU, in bfloat16."""
    config = LlamaConfig(
        vocab_size=32768,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        dtype="bfloat16",
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        return LlamaForCausalLM(config)


def main() -> int:
    """Measure on a GPU; return the exit status."""
    if not torch.cuda.is_available():
        print("this measurement needs a GPU", file=sys.stderr)
        return 2
    runner = ModelRunner(_random_model())
    tokens_each = 1 + max(TREE_TOKENS)
    runner.capture(Bounds(max(BATCHES), tokens_each, max(BATCHES) * tokens_each))
    for cell in measure(runner):
        print(json.dumps({"device": torch.cuda.get_device_name(), **cell}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
