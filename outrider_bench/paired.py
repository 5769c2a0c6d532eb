"""Compares ways of decoding that differ by little: each round measures all, in random order.

Ratios are taken within rounds, so that other load on the machine meets all ways alike.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import track

from outrider.launch.prompts import DEMO_PROMPTS
from outrider.tokenizer import load_tokenizer
from outrider_bench.console import table_of
from outrider_bench.ways import Measure, Pair, Task

BATCH = 8
_RESAMPLES = 2_000


def task_of(pair: Pair, tokens: int) -> Task:
    """Four requests for each place of a batch of 8."""
    tokenizer = load_tokenizer(str(pair.target))
    prompts = [tokenizer.encode(prompt).ids for _, prompt in DEMO_PROMPTS]
    return Task([prompts[i % len(prompts)] for i in range(4 * BATCH)], BATCH, tokens, 0.0)


async def compare(
    ways: Mapping[str, Measure],
    compared_with: Mapping[str, str],
    task: Task,
    rounds: int,
    console: Console,
    title: str,
) -> dict[str, Any]:
    """Measure tokens/s of each way, print them, and return them with their ratios.

    `compared_with` has the way that each is divided by. Ratios are medians with 95 % intervals. A
    first round is not kept.
    """
    generator = random.Random(0)
    found: dict[str, list[float]] = {name: [] for name in ways}
    for round_number in track(range(1 + rounds), title, console=console):
        for name in generator.sample(list(ways), len(ways)):
            sample = await ways[name](task)
            if round_number:
                found[name].append(sample.tokens_per_s)
    columns = ("way", "tokens/s, median", "compared with", "ratio, paired", "95 % interval")
    table = table_of(f"throughput: {title}", columns, text=["compared with"])
    record: dict[str, Any] = {}
    for name, rates in found.items():
        base = compared_with[name]
        ratios = [rate / other for rate, other in zip(rates, found[base], strict=True)]
        low, high = _interval(ratios)
        table.add_row(
            name, f"{median(rates):.1f}", base, f"{median(ratios):.4f}", f"{low:.4f} to {high:.4f}"
        )
        record[name] = {
            "tokens_per_s": rates,
            "compared_with": base,
            "ratio": median(ratios),
            "interval": [low, high],
        }
    console.print(table)
    return record


def _interval(values: list[float]) -> tuple[float, float]:
    """The percentile bootstrap's 95 % interval of the median."""
    generator = random.Random(0)
    medians = sorted(median(generator.choices(values, k=len(values))) for _ in range(_RESAMPLES))
    return medians[int(0.025 * _RESAMPLES)], medians[int(0.975 * _RESAMPLES)]
