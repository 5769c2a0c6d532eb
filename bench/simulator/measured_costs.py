"""Measures a cost table on this machine: trial forwards of a target and a draft model, and the engine's own time a step."""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch

from bench.simulator.costs import Costs, DraftingCost, Forward
from bench.simulator.events import Events
from bench.simulator.target import SimulatedVerifier
from bench.simulator.world import Text, World
from outrider.depth_policy import DepthPolicy
from outrider.lm.pages import PagePool
from outrider.lm.runner import ModelRunner, Slice
from outrider.messages import SamplingParams, TokenRequest
from verifier_svc.engine import Engine
from verifier_svc.metrics import Metrics
from verifier_svc.target import Limits

_SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128)
_TOKENS = (1, 2, 3, 5, 9)
_CONTEXT = 128
_PROMPTS = (32, 256)
_REPEATS = 100
# How long to try each.
_POINT_S = 1.0
# Forwards of more tokens than this take too long to be worth it, and no step has as many.
_MOST_TOKENS = 512
_HOST_STEPS = 60


def write_costs(models: Path, path: Path) -> None:
    """Measure the pair in `models` (target and draft) and write the table."""
    # As `outrider bench` runs the bundled pair: one core is left to the drafters.
    threads = max(1, len(os.sched_getaffinity(0)) - 1)
    path.write_text(measure(models / "target", models / "draft", threads).model_dump_json(indent=1) + "\n")


def measure(target_path: Path, draft_path: Path, threads: int, dtype: str = "auto") -> Costs:
    """The table, with so many threads for the target; takes about two minutes for the bundled pair on two cores."""
    target = ModelRunner.load(str(target_path), dtype=dtype, threads=threads)
    forwards = [
        Forward(sequences=count, tokens=tokens, seconds=_forward_s(target, count, tokens))
        for count in _SEQUENCES
        for tokens in _TOKENS
        if count * tokens <= _MOST_TOKENS
    ]
    step_s, token_s = _prompts(target, forwards[0].seconds)
    host_step_s, host_sequence_s = _host()
    source = f"measured with {threads} of {os.cpu_count()} cores of {_processor()}: {target_path}, {target.dtype}"
    del target
    draft = ModelRunner.load(str(draft_path), dtype=dtype, threads=1)
    of_tokens = {count: _forward_s(draft, count, 1) for count in _SEQUENCES}
    _, draft_prompt_token_s = _prompts(draft, of_tokens[1])
    return Costs(
        source=source,
        forwards=forwards,
        prompt_step_s=step_s,
        prompt_token_s=token_s,
        host_step_s=host_step_s,
        host_sequence_s=host_sequence_s,
        drafting={
            "model": DraftingCost(round_s=0.0, token_s=of_tokens, prompt_token_s=draft_prompt_token_s),
            # Lookups take microseconds; docs/benchmarks.md has them.
            "ngram": DraftingCost(round_s=0.0001, token_s={1: 0.0}, prompt_token_s=0.0),
        },
    )


def _forward_s(runner: ModelRunner, sequences: int, tokens: int) -> float:
    """Seconds of a forward of so many sequences with so many tokens each behind a context, all tokens scored."""
    size = runner.page_size
    pages = -(-(_CONTEXT + tokens) // size)
    slices = [Slice([0] * tokens, _CONTEXT, [*range(i * pages, (i + 1) * pages)], tokens) for i in range(sequences)]
    return _best_s(lambda: runner.forward(slices)[0, 0].item())


def _prompts(runner: ModelRunner, plain_s: float) -> tuple[float, float]:
    """Seconds that a step with a prompt adds, and seconds that each of its tokens adds."""
    short, long = (
        _best_s(lambda: runner.forward([Slice([0] * count, 0, [*range(-(-count // runner.page_size))], 1)])[0, 0].item())  # noqa: B023
        for count in _PROMPTS
    )
    token_s = max(0.0, long - short) / (_PROMPTS[1] - _PROMPTS[0])
    return max(0.0, short - plain_s - _PROMPTS[0] * token_s), token_s


def _best_s(work: Callable[[], object]) -> float:
    """The fastest of many times, so that what else runs on the machine does not count."""
    work()
    best, end = math.inf, time.perf_counter() + _POINT_S
    for _ in range(_REPEATS):
        started = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - started)
        if time.perf_counter() > end:
            break
    return best


def _host() -> tuple[float, float]:
    """Seconds that the engine itself takes for a step, and for each sequence in it: plain steps whose forward takes no time."""
    one, many = (_host_s(count) for count in (1, 64))
    each = max(0.0, many - one) / 63
    return max(0.0, one - each), each


def _host_s(sequences: int) -> float:
    events, world, costs = Events(), World(0), _free()
    model = _FreeTarget()
    limits = Limits(depth=DepthPolicy(), max_sequences=sequences)
    pool, verifier = PagePool(64 * sequences, 16), SimulatedVerifier(events, costs, world)
    engine = Engine(model, pool, lambda said: None, Metrics(""), limits, verifier)
    for number in range(sequences):
        world.add(Text(number, "", 8, 1000))
        engine.submit(TokenRequest([number] * 8, 1000, SamplingParams(0.0, seed=0), ignore_eos=True), lambda message: None)
    times: list[float] = []
    for _ in range(_HOST_STEPS):
        started = time.perf_counter()
        engine.advance()
        times.append(time.perf_counter() - started)
    return min(times)


class _FreeTarget:
    vocab_size = 256
    eos_token_ids: tuple[int, ...] = ()

    def forward(self, slices: object) -> torch.Tensor:
        return torch.zeros(1, 1)


def _free() -> Costs:
    return Costs(
        source="nothing",
        forwards=[Forward(sequences=1, tokens=1, seconds=1e-9)],
        prompt_step_s=0.0,
        prompt_token_s=0.0,
        host_step_s=0.0,
        host_sequence_s=0.0,
    )


def _processor() -> str:
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return models[0].partition(":")[2].strip() if models else platform.processor()
