"""`outrider lab bench`: drafters of two pairs of models beside plain decoding, and beside vLLM.

Each pair is an experiment over drafters and batch sizes. vLLM decodes the same requests in the same
rounds, never at the same time. Writes the run's folder and its report.
"""

from __future__ import annotations

import asyncio
import fnmatch
import os
from contextlib import AsyncExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

from outrider.errors import invalid
from outrider_bench import host_time, vllm_ways
from outrider_bench.console import console_for_output
from outrider_bench.experiment.report import output, results
from outrider_bench.experiment.run import run as run_experiment
from outrider_bench.experiment.spec import Experiment
from outrider_bench.grow import Shape
from outrider_bench.grown import grown_checkpoint
from outrider_bench.settings import BenchSettings
from outrider_bench.vllm_ways import Pair

# The bundled pair. To measure other checkpoints, write an experiment file.
_MODELS = Path("models")
_GROWN = Shape(hidden=1280, layers=24, heads=20, kv_heads=4, intermediate=3456)
# Draft tokens that vLLM verifies in one step. A forward of the grown target costs much more than a
# guess.
_BUNDLED_DRAFT_TOKENS = 4
_GROWN_DRAFT_TOKENS = 6
_DEMO_KINDS = ["code", "rewriting", "json"]
_OURS = {
    "ngram": ["ngram"],
    "suffix": ["suffix"],
    "model": ["model"],
    "auto": ["ngram", "suffix", "model"],
}
"""Drafters that run, by the name of the way."""


def run(settings: BenchSettings, command: str) -> None:
    """Measure, print and write; `command` is recorded.

    Raises StackFailed, OSError or RuntimeError when a process of ours or of vLLM fails.
    """
    console = console_for_output()
    if settings.only == "host":
        host_time.measure(console)
        return
    for pair in _pairs(settings, console):
        asyncio.run(_measure(pair, settings, console, command))


def _pairs(settings: BenchSettings, console: Console) -> list[Pair]:
    target = _MODELS / "target"
    draft = _MODELS / "draft"
    cores = len(os.sched_getaffinity(0))
    pairs = []
    if settings.only in ("", "bundled"):
        threads = max(1, cores - 1)
        pairs.append(Pair("bundled", target, draft, "float32", _BUNDLED_DRAFT_TOKENS, threads))
    if settings.only in ("", "grown"):
        console.print("growing the target, unless that was done before")
        grown = grown_checkpoint(target, settings.out, _GROWN, "bfloat16")
        # A forward of the large target takes many times as long as one of the draft model, so the
        # target may use all cores.
        pairs.append(Pair("grown", grown, draft, "bfloat16", _GROWN_DRAFT_TOKENS, cores))
    return pairs


async def _measure(pair: Pair, settings: BenchSettings, console: Console, command: str) -> None:
    """Measure a pair, and print its report."""
    experiment = experiment_of(pair, settings, console)
    peers = {}
    async with AsyncExitStack() as stack:
        if settings.vllm is not None:
            for name in vllm_ways.ways(pair):
                if _wanted(settings, name):
                    way = vllm_ways.started(pair, name, settings.vllm, max(settings.batches))
                    peers[name] = await stack.enter_async_context(way)
        if experiment.sweep["use"] == [[]] and not peers:
            raise invalid("ways", f"{' '.join(settings.ways)} names none that can be measured here")
        folder = await run_experiment(
            experiment, experiment.cells(), settings.out / "bench", console, command, peers=peers
        )
    output.write(results.read(folder), console)


def experiment_of(pair: Pair, settings: BenchSettings, console: Console) -> Experiment:
    """The experiment of a pair; raises ValueError for a pattern that no way's name has."""
    known = [*_OURS, *vllm_ways.ways(pair)]
    for pattern in settings.ways:
        if not fnmatch.filter(known, pattern):
            raise ValueError(f"ways: no way is called {pattern!r}; there are {'; '.join(known)}")
    has_suffix = find_spec("arctic_inference") is not None
    if not has_suffix and (_wanted(settings, "suffix") or _wanted(settings, "auto")):
        console.print("without suffix drafters: arctic-inference is not installed")
    wanted = [drafters for name, drafters in _OURS.items() if _wanted(settings, name)]
    uses = [[each for each in used if has_suffix or each != "suffix"] for used in wanted]
    workload: dict[str, Any] = {"waves": settings.waves, "output_tokens": settings.tokens}
    if settings.prompts is not None:
        workload["prompts"] = settings.prompts
    else:
        workload["kinds"] = _DEMO_KINDS
    return Experiment.model_validate(
        {
            "name": f"bench-{pair.name}",
            "question": f"What do drafters bring over plain decoding of the {pair.name} target?",
            "target": {"model": pair.target, "dtype": pair.dtype, "threads": pair.threads},
            "drafters": {
                "ngram": {"family": "ngram"},
                "suffix": {"family": "suffix"},
                "model": {"family": "model", "model": pair.draft, "threads": 1},
            },
            "workload": workload,
            # Without a drafter of ours, plain decoding is measured alone.
            "sweep": {
                "use": [used for used in uses if used] or [[]],
                "workload.batch": settings.batches,
            },
            "repetitions": settings.rounds,
        }
    )


def _wanted(settings: BenchSettings, name: str) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in settings.ways)
