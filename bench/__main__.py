"""`outrider bench`: tokens/s of Outrider through its gateway beside transformers' own generation, in one run.

Every way of decoding is loaded first and measured in turn, round after round, never two at a time; greedy, the same prompts, the
same number of tokens. Prints medians with their range and writes all figures, with the machine and the commit, as JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx
from pydantic import Field
from pydantic_settings import SettingsConfigDict
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench import acceptance
from bench.grow import Shape, grown_checkpoint
from bench.prompts import DEMO_PROMPTS
from outrider.config import Settings, parse
from outrider.local import until_ready
from outrider.stack import ServeSettings, plan_stack
from outrider.supervisor import Supervisor
from outrider.tokenizer import load_tokenizer

Measure = Callable[[list[list[int]], int], Awaitable[tuple[int, float]]]
"""Prompts decoded as one batch, tokens for each: how many came, in how many seconds."""


class BenchSettings(Settings):
    """What `outrider bench` takes."""

    model_config = SettingsConfigDict(env_prefix="OUTRIDER_BENCH_")

    models: Path = Path("models")
    """Directory of the bundled pair, target and draft."""

    only: Literal["bundled", "grown", "acceptance", ""] = ""
    """Measure only the bundled pair, only the target grown to 294 M parameters, or only how much is accepted, which is not part
    of the whole otherwise."""

    rounds: int = Field(3, ge=1)
    """How often each way is measured; the table shows medians."""

    tokens: int = Field(48, ge=8, le=512)
    """Tokens generated for each prompt."""

    batches: list[int] = Field([1, 8])
    """Batch sizes; at 1, four prompts are decoded one after the other."""

    depth: int | None = Field(None, ge=1, le=16)
    """Draft tokens verified in one step, in Outrider and in transformers' prompt lookup; unset is 4 for the bundled target and 6
    for the grown one, whose forward costs much more than a guess."""

    grown_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Weights of the grown target; the bundled pair is measured in float32."""

    out: Path = Path("bench/out")
    """Directory for the grown checkpoint and the JSON."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and its draft model. `shared_threads` are the verifier's beside a draft model on the same cores."""

    name: str
    target: Path
    draft: Path
    dtype: str
    depth: int
    shared_threads: int


def main(arguments: list[str]) -> int:
    """The exit status."""
    settings = parse(BenchSettings, "outrider bench", arguments)
    console = Console() if sys.stdout.isatty() else Console(width=120)
    if settings.only == "acceptance":
        console.print(acceptance.tables(settings.models, settings.tokens))
        return 0
    pairs = _pairs(settings, console)
    started = time.strftime("%Y-%m-%d %H:%M:%S")
    record: dict[str, Any] = {"machine": _machine(), "arguments": arguments, "started": started, "pairs": {}}
    for pair in pairs:
        figures = asyncio.run(_measure_pair(pair, settings, console))
        record["pairs"][pair.name] = figures
        console.print(_table(pair, figures, settings))
    settings.out.mkdir(parents=True, exist_ok=True)
    path = settings.out / f"bench-{time.strftime('%Y%m%d-%H%M%S')}.json"
    path.write_text(json.dumps(record, indent=1))
    console.print(f"all figures: {path}; machine: {record['machine']}", markup=False)
    return 0


def _pairs(settings: BenchSettings, console: Console) -> list[Pair]:
    target, draft = settings.models / "target", settings.models / "draft"
    cores = os.cpu_count() or 1
    pairs = []
    if settings.only in ("", "bundled"):
        pairs.append(Pair("bundled, 12 M, float32", target, draft, "float32", settings.depth or 4, max(1, cores - 1)))
    if settings.only in ("", "grown"):
        console.print("growing the target to 294 M parameters, unless that was done before")
        grown = grown_checkpoint(target, settings.out, Shape(), settings.grown_dtype)
        # A forward of the large target outlasts the draft model's many times over, so it may have all cores.
        pairs.append(Pair(f"grown, 294 M, {settings.grown_dtype}", grown, draft, settings.grown_dtype, settings.depth or 6, cores))
    return pairs


def _machine() -> str:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    name = models[0].partition(":")[2].strip() if models else platform.processor()
    return f"{os.cpu_count()} cores of {name}, commit {commit or 'unknown'}"


async def _measure_pair(pair: Pair, settings: BenchSettings, console: Console) -> dict[str, dict[str, list[float]]]:
    """tokens/s by way and batch size, one figure a round."""
    tokenizer = load_tokenizer(str(pair.target))
    prompts = [tokenizer.encode(prompt).ids for _, prompt in DEMO_PROMPTS]
    figures: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    async with AsyncExitStack() as stack:
        ways = await _ways(stack, pair, console)
        with Progress(console=console) as progress:
            task = progress.add_task(pair.name, total=(1 + settings.rounds) * len(ways))
            for round_number in range(1 + settings.rounds):
                for name, measure in ways.items():
                    progress.update(task, description=f"{pair.name}: {name}")
                    for batch in settings.batches:
                        rate = await _rate(measure, prompts, batch, settings.tokens if round_number else 8)
                        if round_number:
                            figures[name][str(batch)].append(rate)
                    progress.advance(task)
    return {name: dict(by_batch) for name, by_batch in figures.items()}


async def _rate(measure: Measure, prompts: list[list[int]], batch: int, tokens: int) -> float:
    """tokens/s over a few batches, of prompts of every kind."""
    count = max(4, batch)
    picked = [prompts[i * len(prompts) // count % len(prompts)] for i in range(count)]
    results = [await measure(picked[i : i + batch], tokens) for i in range(0, len(picked), batch)]
    return sum(count for count, _ in results) / sum(seconds for _, seconds in results)


async def _ways(stack: AsyncExitStack, pair: Pair, console: Console) -> dict[str, Measure]:
    peer = await stack.enter_async_context(_peer(pair))
    wide = await stack.enter_async_context(_outrider(pair, console, ["ngram"], os.cpu_count() or 1))
    shared = await stack.enter_async_context(_outrider(pair, console, [f"model={pair.draft}"], pair.shared_threads))
    return {
        "transformers": peer("plain"),
        "outrider, plain": wide({"enabled": False}),
        "transformers, prompt lookup": peer("prompt_lookup"),
        "outrider, ngram": wide({"drafter": "ngram"}),
        "transformers, assisted": peer("assisted"),
        "outrider, model": shared({"drafter": "model"}),
    }


@asynccontextmanager
async def _peer(pair: Pair) -> AsyncIterator[Callable[[str], Measure]]:
    """transformers in a process of its own, with all cores."""
    arguments = [str(pair.target), str(pair.draft), "--dtype", pair.dtype, "--depth", str(pair.depth)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.peers", *arguments, stdin=-1, stdout=-1, stderr=asyncio.subprocess.DEVNULL
    )
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("the peer has no pipes")
    send, receive = process.stdin, process.stdout

    def measure(way: str) -> Measure:
        async def run(prompts: list[list[int]], tokens: int) -> tuple[int, float]:
            send.write(json.dumps({"way": way, "prompts": prompts, "max_tokens": tokens}).encode() + b"\n")
            answer = json.loads(await receive.readline())
            return answer["tokens"], answer["seconds"]

        return run

    try:
        yield measure
    finally:
        process.kill()
        await process.wait()


@asynccontextmanager
async def _outrider(
    pair: Pair, console: Console, drafters: list[str], threads: int
) -> AsyncIterator[Callable[[dict[str, Any]], Measure]]:
    """A whole stack, measured through its gateway's HTTP API."""
    wanted = {"target": str(pair.target), "dtype": pair.dtype, "drafter": drafters, "threads": threads, "depth": pair.depth}
    # Every round repeats the prompts, and transformers computes them anew each time.
    wanted["prefix_caching"] = False
    serve = ServeSettings.model_validate({**wanted, "http_port": 0, "grpc_port": 0, "log_level": "warning"})
    supervisor = Supervisor(lambda name, line: None)
    with tempfile.TemporaryDirectory(prefix="outrider-bench-") as directory:
        stack = plan_stack(serve, Path(directory))
        try:
            for child in stack.children:
                supervisor.start(child)
            ready = until_ready(stack.http_url, lambda stage: None, len(drafters))
            await asyncio.wait_for(supervisor.settle(ready), 300)
            console.print(f"ready: {pair.name} with {', '.join(drafters)}")
            async with httpx.AsyncClient(base_url=stack.http_url, timeout=600) as client:
                yield lambda speculation: _completions(client, serve.target, speculation)
        finally:
            await supervisor.stop()


def _completions(client: httpx.AsyncClient, model: str, speculation: dict[str, Any]) -> Measure:
    async def one(prompt: list[int], tokens: int) -> int:
        limits = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        response = await client.post(
            "/v1/completions", json={"model": model, "prompt": prompt, "speculation": speculation, **limits}
        )
        response.raise_for_status()
        count: int = response.json()["usage"]["completion_tokens"]
        return count

    async def run(prompts: list[list[int]], tokens: int) -> tuple[int, float]:
        started = time.perf_counter()
        counts = await asyncio.gather(*(one(prompt, tokens) for prompt in prompts))
        return sum(counts), time.perf_counter() - started

    return run


def _table(pair: Pair, figures: dict[str, dict[str, list[float]]], settings: BenchSettings) -> Table:
    title = (
        f"{pair.name}, depth {pair.depth}: tokens/s, median of {settings.rounds} rounds (range), and × transformers' plain generate"
    )
    table = Table(title=title)
    table.add_column("way")
    for batch in settings.batches:
        table.add_column(f"batch {batch}", justify="right")
        table.add_column("×", justify="right")
    base = {batch: statistics.median(rates) for batch, rates in figures["transformers"].items()}
    for name, by_batch in figures.items():
        cells = []
        for size, rates in by_batch.items():
            median = statistics.median(rates)
            cells += [f"{median:.1f} ({min(rates):.1f}–{max(rates):.1f})", f"{median / base[size]:.2f}"]
        table.add_row(name, *cells)
    return table


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
