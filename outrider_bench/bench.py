"""`outrider lab bench`: Outrider through its gateway beside vLLM, in one run.

All ways of decoding are loaded first. Each round then measures them in turn, never two at a time,
with the same checkpoints, prompts and number of tokens. Prints medians with their range, and writes
all figures, the machine and the commit as JSON.
"""

from __future__ import annotations

import asyncio
import fnmatch
import json
import os
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from outrider.launch.grow import Shape
from outrider_bench import host_time, prompt_files
from outrider_bench.console import console_for_output, progress
from outrider_bench.experiment.launches import SYNTHETIC_PATH
from outrider_bench.experiment.machine import commit
from outrider_bench.experiment.run import there_and_back
from outrider_bench.experiment.traffic import Encoder, Request, spread_lengths
from outrider_bench.grown import grown_checkpoint
from outrider_bench.processor import processor_name
from outrider_bench.prompt_files import Prompt
from outrider_bench.report import Results, tables, write
from outrider_bench.settings import BenchSettings
from outrider_bench.ways import (
    Measure,
    Pair,
    Task,
    outrider_stack,
    outrider_way,
    vllm_way,
)

# Rates are compared with those of this way.
_BASE = "outrider, plain"
_DEMO_KINDS = ("code", "rewriting", "json")
# The bundled pair. To measure other checkpoints, run `outrider serve` and a load generator.
_MODELS = Path("models")
_GROWN = Shape(hidden=1280, layers=24, heads=20, kv_heads=4, intermediate=3456)
# Draft tokens that the peers verify in one step. A forward of the grown target costs much more than
# a guess. Outrider chooses its own number.
_BUNDLED_DRAFT_TOKENS = 4
_GROWN_DRAFT_TOKENS = 6
# Outrider's ways, with the `speculation` of their requests.
_OURS: dict[str, dict[str, Any]] = {
    "outrider, plain": {"enabled": False},
    **{f"outrider, {name}": {"drafter_family": name} for name in ("ngram", "suffix", "model")},
    "outrider, auto": {},
}


def run(settings: BenchSettings, arguments: list[str]) -> int:
    """Measure, print and write; returns the exit status. `arguments` are recorded."""
    console = console_for_output()
    stem, machine = f"bench-{time.strftime('%Y%m%d-%H%M%S')}", _machine()
    record: dict[str, Any] = {"machine": machine, "arguments": arguments, "started": stem}
    console.print(f"machine: {machine}; arguments: {' '.join(arguments)}", markup=False)
    if settings.only == "host":
        record["host"] = host_time.measure(console)
    else:
        record["pairs"] = _measure_pairs(settings, console)
    print(f"written: {write(settings.out, stem, record)}")
    return 0


def _check_ways(patterns: Sequence[str], pair: Pair) -> None:
    """Raise ValueError for a pattern that no way's name has."""
    known = [*_OURS, *_vllm_ways(pair)]
    for pattern in patterns:
        if not fnmatch.filter(known, pattern):
            raise ValueError(f"ways: no way is called {pattern!r}; there are {'; '.join(known)}")


def _measure_pairs(settings: BenchSettings, console: Console) -> dict[str, Any]:
    """Measure all ways of decoding with each pair of models; returns the samples by pair."""
    found = {}
    for pair in _pairs(settings, console):
        _check_ways(settings.ways, pair)
        results = asyncio.run(_measure_pair(pair, settings, console))
        found[pair.name] = results.as_json()
        for table in tables(results, _BASE):
            console.print(table)
    return found


def _pairs(settings: BenchSettings, console: Console) -> list[Pair]:
    target = _MODELS / "target"
    draft = _MODELS / "draft"
    cores = len(os.sched_getaffinity(0))
    pairs = []
    if settings.only in ("", "bundled"):
        threads = max(1, cores - 1)
        name = "bundled, 12 M, float32"
        pairs.append(Pair(name, target, draft, "float32", _BUNDLED_DRAFT_TOKENS, threads))
    if settings.only in ("", "grown"):
        console.print("growing the target, unless that was done before")
        grown = grown_checkpoint(target, settings.out, _GROWN, "bfloat16")
        # A forward of the large target takes many times as long as one of the draft model, so the
        # target may use all cores.
        name = "grown, 418 M, bfloat16"
        pairs.append(Pair(name, grown, draft, "bfloat16", _GROWN_DRAFT_TOKENS, cores))
    return pairs


def _machine() -> str:
    """Describe the processor, the GPU, the versions and the commit."""
    parts = [f"{os.cpu_count()} cores of {processor_name()}"]
    if torch.cuda.is_available():
        parts.append(torch.cuda.get_device_name())
    parts.append(f"torch {torch.__version__}, commit {commit(Path(__file__).parents[1])}")
    return ", ".join(parts)


async def _measure_pair(pair: Pair, settings: BenchSettings, console: Console) -> Results:
    """Measure every way at every batch size in each round. A first, short round is not kept."""
    encoder = Encoder(pair.target)
    asked = _asked(settings.prompts)
    results = Results(pair.name)
    async with AsyncExitStack() as stack:
        ways = await _ways(stack, pair, settings, console)
        count = (1 + settings.rounds) * len(ways) * len(settings.batches)
        with progress(console) as shown:
            bar = shown.add_task(pair.name, total=count)
            for round_number in range(1 + settings.rounds):
                order = list(there_and_back(list(ways.items()), round_number - 1))
                for batch in settings.batches:
                    for name, measure in order:
                        shown.update(
                            bar, description=f"{pair.name}: {name}, batch {batch}", advance=1
                        )
                        tokens = 8
                        if round_number:
                            tokens = settings.tokens
                        task = _task(encoder, asked, batch, settings.waves, tokens)
                        sample = await measure(task)
                        if round_number:
                            results.add(batch, name, sample)
    return results


def _asked(file: Path | None) -> list[Prompt]:
    """The prompts of the file kind by kind, or of the demo."""
    kinds = prompt_files.of(file, () if file else _DEMO_KINDS)
    return [prompt for of_kind in kinds.values() for prompt in of_kind]


def _task(encoder: Encoder, asked: list[Prompt], batch: int, waves: int, tokens: int) -> Task:
    """Choose prompts of all kinds, in the same order for every way."""
    count = max(4, waves * batch)
    if count < len(asked):
        picked = [asked[i * len(asked) // count] for i in range(count)]
    else:
        picked = [asked[i % len(asked)] for i in range(count)]
    lengths = spread_lengths(tokens, count) if waves > 2 else [tokens] * count
    requests = [
        Request(0.0, prompt.kind, encoder.ids(prompt), length, None)
        for prompt, length in zip(picked, lengths, strict=True)
    ]
    return Task(requests, batch)


async def _ways(
    stack: AsyncExitStack, pair: Pair, settings: BenchSettings, console: Console
) -> dict[str, Measure]:
    """Load the ways that the settings name."""

    def wanted(*names: str) -> bool:
        return any(fnmatch.fnmatch(name, pattern) for name in names for pattern in settings.ways)

    ways: dict[str, Measure] = {}
    if wanted(*_OURS):
        texts = ["ngram"]
        if wanted("outrider, suffix", "outrider, auto"):
            if find_spec("arctic_inference") is None:
                console.print("without suffix drafters: arctic-inference is not installed")
            else:
                texts.append("suffix")
        ways |= await _our_ways(stack, pair, texts)
    if settings.vllm is not None:
        sizes = max(settings.batches)
        for name, (arguments, drafter) in _vllm_ways(pair).items():
            if wanted(name):
                way = vllm_way(pair, settings.vllm, sizes, arguments, drafter)
                ways[name] = await stack.enter_async_context(way)
    ways = {name: way for name, way in ways.items() if wanted(name)}
    if not ways:
        raise ValueError(f"ways: {' '.join(settings.ways)} names none that can be measured here")
    console.print(f"{pair.name}: {'; '.join(ways)}")
    return ways


async def _our_ways(stack: AsyncExitStack, pair: Pair, texts: list[str]) -> dict[str, Measure]:
    """Outrider with the draft model and `texts`, the drafters that need none."""
    cores = len(os.sched_getaffinity(0))
    shared = await stack.enter_async_context(
        outrider_stack(pair, [*texts, "model"], pair.shared_threads)
    )
    wide = shared
    if pair.shared_threads != cores:
        # Without a draft model on the same cores the target may have them all.
        wide = await stack.enter_async_context(outrider_stack(pair, texts, cores))
    beside_model = ("outrider, model", "outrider, auto")
    return {
        name: outrider_way(shared if name in beside_model else wide, speculation)
        for name, speculation in _OURS.items()
        if name != "outrider, suffix" or "suffix" in texts
    }


def _vllm_ways(pair: Pair) -> dict[str, tuple[list[str], list[str]]]:
    """vLLM's own ways, and those with our scheduler: flags of its peer, and of our drafter."""
    count = {"num_speculative_tokens": pair.draft_tokens}
    methods: dict[str, dict[str, Any]] = {
        "ngram": {"prompt_lookup_max": 3, "prompt_lookup_min": 1},
        "draft_model": {"model": str(pair.draft)},
        "suffix": {},
    }
    ours = ["--drafts", str(pair.draft_tokens)]
    draft = ["--model", str(pair.draft), "--dtype", pair.dtype, "--threads", "1"]
    return {
        "vllm": ([], []),
        **{
            f"vllm, {method}": (
                ["--speculative", json.dumps({"method": method, **options, **count})],
                [],
            )
            for method, options in methods.items()
        },
        "vllm, our scheduler": (ours, []),
        "vllm, our ngram": (ours, ["--family", "ngram"]),
        "vllm, our model": (ours, ["--family", "model", *draft]),
        "vllm, always wrong": (ours, ["--family", SYNTHETIC_PATH, "--acceptance", "0"]),
    }
