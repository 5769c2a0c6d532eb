"""Measures how much a draft model is slowed down by a target on the same core.

No stack runs meanwhile. This module is also the draft model's process, `MODEL DTYPE CORES`: it runs
forwards without end, with a thread for each core, and prints its rate.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from outrider.lm.runner import ModelRunner, SequenceSlice

_WATCH_S = 1.5
_CONTEXT = 128


def slowdown_on_target_cores(
    target: Path, draft: Path, dtype: str, threads: int, cores: list[int]
) -> float:
    """How many times longer forwards of the draft model take on a core of the target.

    The draft model has one thread there, and the target as many as `threads`.
    """
    runner = ModelRunner.load(str(target), dtype=dtype, threads=threads, page_count=64)
    before = os.sched_getaffinity(0)
    try:
        _pin(cores[:threads])
        with _drafting(draft, dtype, cores[:1]) as (alone, speed_since):
            _rate(runner, lambda since: since > _WATCH_S)
            return max(alone / max(speed_since(), 1e-9), 1e-9)
    finally:
        _pin(before)


@contextmanager
def _drafting(
    model: Path, dtype: str, place: list[int]
) -> Iterator[tuple[float, Callable[[], float]]]:
    """Run forwards of a model in a process until the context ends.

    Gives its speed before the context began, and a function that returns its speed since then, both
    in tokens a second.
    """
    arguments = (str(model), dtype, ",".join(map(str, place)))
    with _child("outrider_bench.experiment.probes", *arguments) as child:
        output = child.stdout
        if output is None:
            raise RuntimeError("the drafting process has no output")
        output.readline()
        alone = float(output.readline())

        def speed_since() -> float:
            child.send_signal(signal.SIGUSR1)
            return float(output.readline())

        yield alone, speed_since


def _pin(cores: Any) -> None:
    """Pin all threads of this process, also those of the pool that computes."""
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), cores)


def _draft(model: str, dtype: str, cores: list[int]) -> Iterator[str]:
    """Yield `ready`, then tokens a second alone, then those from then until SIGUSR1."""
    os.sched_setaffinity(0, cores)
    runner = ModelRunner.load(model, dtype=dtype, threads=len(cores), page_count=64)
    asked: list[bool] = []
    signal.signal(signal.SIGUSR1, lambda *_: asked.append(True))
    yield "ready"
    yield str(_rate(runner, lambda since: since > _WATCH_S))
    yield str(_rate(runner, lambda since: bool(asked)))


def _rate(runner: ModelRunner, over: Callable[[float], bool]) -> float:
    """Forwards of one sequence a second, until `over` is true of the seconds so far."""
    pages = [*range(-(-_CONTEXT // runner.page_size) + 1)]
    slices = [SequenceSlice([0], _CONTEXT, pages, 1)]
    count = 0
    started = time.perf_counter()
    while not over(time.perf_counter() - started):
        runner.forward(slices)[0, 0].item()
        count += 1
    return count / (time.perf_counter() - started)


@contextmanager
def _child(module: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run a module in a child process until the context ends."""
    command = [sys.executable, "-m", module, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.terminate()
        process.communicate()


def main(arguments: list[str]) -> None:
    """Run the child process."""
    model, dtype, cores = arguments
    for line in _draft(model, dtype, [int(core) for core in cores.split(",")]):
        print(line, flush=True)
    # The parent ends it.
    signal.pause()


if __name__ == "__main__":
    main(sys.argv[1:])
