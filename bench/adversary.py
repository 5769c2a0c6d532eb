"""`outrider bench --only adversary`: what a drafter costs that is always wrong, by policy of depth. As a process: that drafter."""

from __future__ import annotations

import asyncio
import platform
import random
import sys
from collections.abc import Callable
from typing import Any

import uvloop
from rich.console import Console
from rich.table import Table

from bench.prompts import DEMO_PROMPTS
from bench.report import spread
from bench.ways import MakeWay, Pair, Task, outrider_stack
from drafter_svc.chain import Chain
from drafter_svc.families.base import Failures
from drafter_svc.metrics import Metrics
from drafter_svc.stream import Callbacks, DraftStream
from outrider.messages import MAX_DEPTH, DraftBatch, Hello, ModelInfo, Opened, Placement, Rule, Verdict
from outrider.stack import free_port
from outrider.tokenizer import load_tokenizer

POLICIES = ("goodput", "auto", "fixed:4")
BATCHES = (1, 8, 32)


class RandomFamily:
    """Draws tokens blindly, at once and as many as are asked for."""

    name = "adversary"
    distributions = frozenset({Rule.ONE_HOT})
    max_depth = MAX_DEPTH
    device = "cpu"

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._chains: dict[int, Chain] = {}
        self.failures = Failures(self.close)

    def open(self, opened: Opened) -> None:
        self._chains[opened.sequence_id] = Chain(opened)

    def verdict(self, verdict: Verdict) -> None:
        if chain := self._chains.get(verdict.sequence_id):
            chain.apply(verdict)

    def close(self, sequence_id: int) -> None:
        self._chains.pop(sequence_id, None)

    async def draft(self, interrupted: Callable[[], bool]) -> DraftBatch:
        chains = self._chains.values()
        batch = DraftBatch([run for chain in chains if (run := chain.resend())])
        batch.proposals += [chain.grow([random.randrange(self._vocab_size)] * chain.room) for chain in chains if chain.room]
        return batch

    async def aclose(self) -> None:
        self._chains.clear()


async def measure(pair: Pair, policies: list[str], rounds: int, tokens: int, console: Console) -> dict[str, Any]:
    """tokens/s with and without the drafter in turn, by policy and batch."""
    tokenizer = load_tokenizer(str(pair.target))
    prompts = [tokenizer.encode(prompt).ids for _, prompt in DEMO_PROMPTS]
    record: dict[str, Any] = {}
    table = Table(title=f"{pair.name}: a drafter that is always wrong, × plain decoding, median of {rounds} rounds (range)")
    for name in ("depth", *(f"batch {batch}" for batch in BATCHES)):
        table.add_column(name, justify="left" if name == "depth" else "right")
    for policy in policies:
        ratios = record[policy] = await _ratios(pair, policy, prompts, rounds, tokens)
        table.add_row(policy, *(spread(r, 3) for r in ratios.values()))
    console.print(table)
    return record


async def _ratios(pair: Pair, policy: str, prompts: list[list[int]], rounds: int, tokens: int) -> dict[int, list[float]]:
    verifier = free_port("127.0.0.1")
    ratios: dict[int, list[float]] = {}
    async with outrider_stack(pair, [], pair.shared_threads, verifier_port=verifier, depth=policy) as way:
        process = await asyncio.create_subprocess_exec(sys.executable, "-m", __name__, f"127.0.0.1:{verifier}", stdout=-1)
        try:
            if process.stdout is None or not await process.stdout.readline():
                raise RuntimeError("the adversary could not register")
            for round_number in range(1 + rounds):
                for batch in BATCHES:
                    task = Task([prompts[i % len(prompts)] for i in range(max(4, batch))], batch, tokens, 0.0)
                    ratio = await _ratio(way, task)
                    if round_number:
                        ratios.setdefault(batch, []).append(ratio)
        finally:
            process.kill()
            await process.communicate()
    return ratios


async def _ratio(way: MakeWay, task: Task) -> float:
    """Tokens/s with the drafter over those without: without, with, with, without, so that drift of the machine meets both alike."""
    seconds = dict.fromkeys(("plain", "wrong"), 0.0)
    for name in ("plain", "wrong", "wrong", "plain"):
        seconds[name] += (await way({"enabled": False} if name == "plain" else {"drafter": "adversary"})(task)).seconds
    return seconds["plain"] / seconds["wrong"]


async def _serve(address: str) -> None:
    def hello(family: Any, info: ModelInfo) -> Hello:
        place = Placement(host=platform.node(), device="cpu")
        return Hello("adversary", family.name, info.tokenizer_fingerprint, MAX_DEPTH, family.distributions, place)

    async def registered(at: str) -> None:
        print(f"registered with {at}", flush=True)

    async def lost() -> None:
        return

    def make(info: ModelInfo) -> RandomFamily:
        return RandomFamily(info.vocab_size)

    await DraftStream(lambda: address, make, hello, Callbacks(registered, lost), Metrics("adversary", "adversary")).run()


if __name__ == "__main__":
    uvloop.run(_serve(sys.argv[1]))
