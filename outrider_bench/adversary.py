"""`outrider bench --only adversary`: the cost of a drafter that is always wrong.

Measures the cost by policy of draft tokens, and holds the family of that drafter.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console

from drafter_svc.families.base import Family, Loaded
from drafter_svc.metrics import Metrics
from drafter_svc.placement import PlacementPlan
from outrider.drafter.draft_sequence import DraftSequence
from outrider.launch.prompts import DEMO_PROMPTS
from outrider.process.ports import free_port
from outrider.tokenizer import load_tokenizer
from outrider_bench.console import table_of
from outrider_bench.report import spread
from outrider_bench.ways import MakeWay, Pair, Task, outrider_stack

POLICIES = ("goodput", "auto", "fixed:4")
BATCHES = (1, 8, 32)
_ARGUMENTS = (
    "-m",
    "drafter_svc",
    "--family",
    "outrider_bench.adversary:RandomFamily",
    "--id",
    "adversary",
    "--verifier",
)


class RandomFamily(Family):
    """Draws random tokens at once, as many as there is room for."""

    name = "adversary"

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    @classmethod
    async def load(cls, settings: Any, place: PlacementPlan, metrics: Metrics) -> Loaded:
        """Return the family for any model; only the size of the vocabulary matters."""
        return Loaded(lambda info: cls(info.vocab_size))

    async def propose(
        self, sequences: Sequence[DraftSequence], interrupted: Callable[[], bool]
    ) -> None:
        """Fill each sequence's room with one random token, repeated."""
        for sequence in sequences:
            sequence.extend([random.randrange(self._vocab_size)] * sequence.remaining_window)


async def measure(
    pair: Pair, policies: list[str], rounds: int, tokens: int, console: Console
) -> dict[str, Any]:
    """Measure tokens/s with and without the drafter in turn, by policy and batch."""
    tokenizer = load_tokenizer(str(pair.target))
    prompts = [tokenizer.encode(prompt).ids for _, prompt in DEMO_PROMPTS]
    record: dict[str, Any] = {}
    how = f"× plain decoding, median of {rounds} rounds (range)"
    table = table_of(
        f"{pair.name}: a drafter that is always wrong, {how}",
        ("draft tokens", *(f"batch {batch}" for batch in BATCHES)),
    )
    for policy in policies:
        ratios = record[policy] = await _ratios(pair, policy, prompts, rounds, tokens)
        table.add_row(policy, *(spread(r, 3) for r in ratios.values()))
    console.print(table)
    return record


async def _ratios(
    pair: Pair, policy: str, prompts: list[list[int]], rounds: int, tokens: int
) -> dict[int, list[float]]:
    verifier = free_port("127.0.0.1")
    ratios: dict[int, list[float]] = {}
    async with outrider_stack(
        pair, [], pair.shared_threads, verifier_port=verifier, draft_tokens=policy
    ) as way:
        process = await asyncio.create_subprocess_exec(
            sys.executable, *_ARGUMENTS, f"127.0.0.1:{verifier}", stdout=-1
        )
        try:
            if process.stdout is None or not await process.stdout.readline():
                raise RuntimeError("the adversary could not register")
            for round_number in range(1 + rounds):
                for batch in BATCHES:
                    task = Task(
                        [prompts[i % len(prompts)] for i in range(max(4, batch))],
                        batch,
                        tokens,
                        0.0,
                    )
                    ratio = await _ratio(way, task)
                    if round_number:
                        ratios.setdefault(batch, []).append(ratio)
        finally:
            process.kill()
            await process.communicate()
    return ratios


async def _ratio(way: MakeWay, task: Task) -> float:
    """Tokens/s with the drafter over tokens/s without it.

    The order is without, with, with, without, so that drift of the machine affects both alike.
    """
    plain = way({"enabled": False})
    wrong = way({"drafter_family": "adversary"})
    before = await plain(task)
    samples = (await wrong(task), await wrong(task))
    after = await plain(task)
    return (before.seconds + after.seconds) / sum(sample.seconds for sample in samples)
