"""Measures a cost table on this machine.

This module times forwards of a target and a draft model, n-gram lookups, and the engine's own work
per step.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from drafter_svc.families.cached_draft import CachedDraft
from drafter_svc.families.forwards import Forwards
from drafter_svc.families.ngram import NgramFamily
from drafter_svc.families.shared_pages import SharedPagePool
from drafter_svc.pools.memory import NgramOptions
from outrider.drafter.draft_sequence import DraftSequence
from outrider.lm.runner import Bounds, ModelRunner, SequenceSlice
from outrider.protocol.draft_messages import Opened, Verdict, Window
from outrider.protocol.messages import DraftDistribution, SamplingParams
from outrider_bench.experiment.machine import processor_name
from outrider_bench.host_time import step_seconds
from outrider_bench.simulator.costs import Costs, DraftingCost, Forward, way_of

_Point = TypeVar("_Point")

_SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128)
_TOKENS = (1, 2, 3, 5, 9)
_CONTEXT = 128
_PROMPTS = (32, 256)
_REPEATS = 100
# The number of rounds, and the seconds for a point in each round. Each round measures all points,
# so that a period of other work on the machine does not spoil all measurements of a point.
_ROUNDS = 4
_POINT_S = 0.12
# The number of tokens in a run that one call guesses.
_RUN = 8
# The number of tokens in the text for lookups, and the number of timed drafts.
_TEXT = 200
_LOOKUPS = 100
# Forwards of more tokens take too long to measure, and no step has more.
_MAX_TOKENS = 512


def measure(
    target_path: Path,
    draft_path: Path,
    threads: int,
    dtype: str = "auto",
    draft_threads: Sequence[int] = (1,),
    most_sequences: int = _SEQUENCES[-1],
) -> Costs:
    """Measure the cost table, with `threads` for the target.

    The table's `drafting` has the n-gram family (`ngram`) and the draft model on the CPU with each
    of `draft_threads`: `model` for one thread, `model-2` for two and so on. Where the target is on
    a GPU, `drafting` also has `model-on-target`, the draft model on that GPU. The bundled pair
    takes about a minute on two cores.
    """
    sequences = sequences_up_to(most_sequences)
    target = _served(target_path, dtype, "auto", threads, sequences)
    forwards = _forwards(target, sequences)
    step_s, token_s = _prompts(target, forwards[0].seconds)
    host_step_s, host_sequence_s = _host()
    cores = f"{threads} of {os.cpu_count()} cores of {processor_name()}"
    source = f"measured with {cores}: {target_path}, {target.dtype}"
    device = str(target.device)
    del target
    drafting = {"ngram": _lookup_cost()}
    for count in draft_threads:
        drafting[way_of("model", count)] = _draft_cost(draft_path, dtype, "cpu", count, sequences)
    if device != "cpu":
        drafting["model-on-target"] = _draft_cost(draft_path, dtype, device, 1, sequences)
    return Costs(
        source=source,
        measured=True,
        forwards=forwards,
        prompt_step_s=step_s,
        prompt_token_s=token_s,
        host_step_s=host_step_s,
        host_sequence_s=host_sequence_s,
        drafting=drafting,
    )


def _served(
    path: Path,
    dtype: str,
    device: str,
    threads: int,
    sequences: list[int],
    *,
    int8: bool | None = False,
) -> ModelRunner:
    """Load a model as a service does; on a GPU, with the graphs of all forwards to measure."""
    bounds = Bounds(max(sequences), max(_TOKENS), _MAX_TOKENS)
    runner = ModelRunner.load(
        str(path), dtype=dtype, int8=int8, device=device, threads=threads, bounds=bounds
    )
    runner.capture(bounds)
    return runner


def sequences_up_to(most: int) -> list[int]:
    """Return the batch sizes to measure that have at most `most` sequences."""
    return [count for count in _SEQUENCES if count <= most]


def _forwards(target: ModelRunner, sequences: list[int]) -> list[Forward]:
    points = [
        (count, tokens)
        for count in sequences
        for tokens in _TOKENS
        if count * tokens <= _MAX_TOKENS
    ]
    best_s = _in_rounds(points, lambda point: _forward_s(target, *point))

    def least_s(count: int, tokens: int) -> float:
        """Return the seconds of the fastest forward that is at least as large as this one.

        Such a forward has at least `count` sequences, and at least as many tokens in total.

        More work cannot take less time. If it seems to, something disturbed the smaller forward.
        """
        larger = [(n, each) for n, each in points if n >= count and n * each >= count * tokens]
        return min([best_s[point] for point in larger])

    return [Forward(sequences=n, tokens=each, seconds=least_s(n, each)) for n, each in points]


def _draft_cost(
    path: Path, dtype: str, device: str, threads: int, sequences: list[int]
) -> DraftingCost:
    draft = _served(path, dtype, device, threads, sequences, int8=None)
    token_s = _in_rounds(sequences, lambda count: _draft_s(draft, count))
    run_s: dict[int, float] = {}
    if draft.continues:
        run_s = _in_rounds(sequences, lambda count: _run_s(draft, count))
    run_token_s = {count: seconds / _RUN for count, seconds in run_s.items()}
    _, prompt_token_s = _prompts(draft, token_s[1])
    return DraftingCost(
        round_s=0.0, token_s=token_s, run_token_s=run_token_s, prompt_token_s=prompt_token_s
    )


def _draft_s(runner: ModelRunner, sequences: int) -> float:
    """Return the seconds in which a drafter drafts one token for each of `sequences` sequences."""
    pool = SharedPagePool(runner.page_count, runner.page_size)
    forwards = Forwards(runner, pool, _MAX_TOKENS, 32, None)
    window = Window(token_count=1000, depth=1000)
    drafts = []
    for number in range(sequences):
        sequence = DraftSequence(_opened(number, [number + 1] * _CONTEXT, window))
        drafts.append(CachedDraft(sequence, number, runner.vocab_size, committed_count=_CONTEXT))
    while any(not draft.guess_count for draft in drafts):
        forwards.begin(drafts)
        forwards.grow(forwards.wanting([draft for draft in drafts if not draft.guess_count]))
    times: list[float] = []
    end = time.perf_counter() + _POINT_S
    while len(times) < _REPEATS and time.perf_counter() < end:
        forwards.begin(drafts)
        started = time.perf_counter()
        forwards.grow(forwards.wanting(drafts))
        times.append(time.perf_counter() - started)
    return min(times)


def _opened(number: int, prompt: list[int], window: Window) -> Opened:
    """Return the announcement of a greedy sequence."""
    one_hot = DraftDistribution.ONE_HOT
    greedy = SamplingParams(0.0)
    return Opened(number, prompt, greedy, one_hot, window, 4, prompt_length=len(prompt))


def _run_s(runner: ModelRunner, sequences: int) -> float:
    """Return the seconds of a call that drafts a run for each of `sequences` sequences."""
    pages = -(-(_CONTEXT + _RUN) // runner.page_size)
    slices = [
        SequenceSlice([0], _CONTEXT, [*range(i * pages, (i + 1) * pages)], 1)
        for i in range(sequences)
    ]
    return _best_s(lambda: runner.continue_greedily(slices, _RUN, runner.vocab_size))


def _lookup_cost() -> DraftingCost:
    """Return the n-gram family's time for a run, and for the branches beside it.

    The text has few different tokens, so that every lookup finds something.
    """
    family = NgramFamily(NgramOptions(), 1_000_000)
    draw = random.Random(0)
    text = draw.choices(range(40), k=_TEXT)
    sequence = DraftSequence(_opened(1, text, Window(token_count=102, depth=17)))
    family.opened(sequence)
    chain_s: list[float] = []
    branches_s: list[float] = []
    for i in range(_LOOKUPS):
        sequence.advance_or_rewind(Verdict(1, _TEXT + i + 1, [draw.randrange(40)], 0, 4))
        family.committed(sequence, 0)
        while sequence.remaining_window > 0:
            chain_s.append(_proposing_s(family, sequence))
        branches_s.append(_proposing_s(family, sequence))
    return DraftingCost(
        round_s=0.0,
        token_s={1: 0.0},
        sequence_s=median(chain_s),
        branches_s=median(branches_s),
    )


def _proposing_s(family: NgramFamily, sequence: DraftSequence) -> float:
    work: Any = family.propose([sequence], lambda: False)
    started = time.perf_counter()
    with suppress(StopIteration):
        work.send(None)
    seconds = time.perf_counter() - started
    sequence.resolve()
    return seconds


def _forward_s(runner: ModelRunner, sequences: int, tokens: int) -> float:
    """Return the seconds of a forward of `sequences` sequences with `tokens` scored tokens each."""
    size = runner.page_size
    pages = -(-(_CONTEXT + tokens) // size)
    slices = [
        SequenceSlice([0] * tokens, _CONTEXT, [*range(i * pages, (i + 1) * pages)], tokens)
        for i in range(sequences)
    ]
    return _best_s(lambda: runner.forward(slices)[0, 0].item())


def _prompts(runner: ModelRunner, decode_step_s: float) -> tuple[float, float]:
    """Return the seconds that a prompt adds to a step, and those that each of its tokens adds."""
    short, long = (_prompt_s(runner, count) for count in _PROMPTS)
    token_s = max(0.0, long - short) / (_PROMPTS[1] - _PROMPTS[0])
    return max(0.0, short - decode_step_s - _PROMPTS[0] * token_s), token_s


def _in_rounds(
    points: Sequence[_Point], seconds_of: Callable[[_Point], float]
) -> dict[_Point, float]:
    """Measure all points in several rounds; return the fastest time of each point."""
    best = dict.fromkeys(points, math.inf)
    for _ in range(_ROUNDS):
        for point in points:
            best[point] = min(best[point], seconds_of(point))
    return best


def _prompt_s(runner: ModelRunner, count: int) -> float:
    """Return the seconds of a forward of one prompt of `count` tokens."""
    pages = -(-count // runner.page_size)
    slices = [SequenceSlice([0] * count, 0, [*range(pages)], 1)]
    return _best_s(lambda: runner.forward(slices)[0, 0].item())


def _best_s(work: Callable[[], object]) -> float:
    """Return the time of the fastest of many runs, since other work may slow down some."""
    work()
    best = math.inf
    end = time.perf_counter() + _POINT_S
    for _ in range(_REPEATS):
        started = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - started)
        if time.perf_counter() > end:
            break
    return best


def _host() -> tuple[float, float]:
    """Return the seconds of the engine's own work for a plain step, and for each sequence in it."""
    one, many = (min(step_seconds(count, drafts=False)) for count in (1, 64))
    each = max(0.0, many - one) / 63
    return max(0.0, one - each), each
