"""Measures loopback round trips, and how drafting slows a target's forwards on the same machine.

No stack runs meanwhile. This module's child processes are `echo ADDRESS...`, which answers the
messages of a gRPC stream, and `draft MODEL DTYPE CORES`, which runs forwards without end, with a
thread for each core, and prints its rate.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import grpc
from pydantic import BaseModel, ConfigDict, Field

from outrider.lm.runner import ModelRunner, SequenceSlice
from outrider.process import rpc
from outrider.process.ports import free_port

_METHOD = "/outrider.bench.Echo/Stream"
# As large as a draft of a few tokens.
_MESSAGE = bytes(100)
_MESSAGES = 400
_WATCH_S = 1.5
_CONTEXT = 128
_START_S = 60.0


class RoundTrip(BaseModel):
    """The round trip of a message on a gRPC stream, in seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    median_s: float = Field(gt=0)
    p90_s: float = Field(gt=0)


class Interference(BaseModel):
    """How many times longer forwards of target and draft model take beside each other."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    target: float = Field(gt=0)
    drafter: float = Field(gt=0)


# --- the loopback interface ---


def round_trips() -> dict[str, RoundTrip]:
    """Round trips between two processes over `tcp`, over `unix`, and through an idle `link`."""
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        port, front, control = (free_port("127.0.0.1") for _ in range(3))
        unix = f"unix:{Path(directory, 'echo.sock')}"
        echo = ("echo", f"127.0.0.1:{port}", unix)
        stack.enter_context(_child("outrider_bench.experiment.probes", *echo))
        forward = f"127.0.0.1:{front}=127.0.0.1:{port}"
        arguments = ("--control", f"127.0.0.1:{control}", "--forward", forward)
        stack.enter_context(_child("outrider_bench.experiment.link_process", *arguments))
        addresses = {"tcp": f"127.0.0.1:{port}", "unix": unix, "link": f"127.0.0.1:{front}"}
        return {name: asyncio.run(_round_trip(address)) for name, address in addresses.items()}


async def _round_trip(address: str) -> RoundTrip:
    async with rpc.dial(address) as channel:
        async with asyncio.timeout(_START_S):
            await channel.channel_ready()
        stream: Any = channel.stream_stream
        call = stream(_METHOD)()
        times = []
        for _ in range(_MESSAGES):
            started = time.perf_counter()
            await call.write(_MESSAGE)
            await call.read()
            times.append(time.perf_counter() - started)
        await call.done_writing()
    return RoundTrip(median_s=median(times), p90_s=quantiles(times, n=10)[-1])


async def _echo(addresses: list[str]) -> None:
    async def answer(requests: Any, context: Any) -> Any:
        async for request in requests:
            yield request

    handler = grpc.stream_stream_rpc_method_handler(answer)
    service, method = _METHOD.strip("/").split("/")
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {method: handler}),)
    )
    for address in addresses:
        server.add_insecure_port(address)
    await server.start()
    await server.wait_for_termination()


# --- forwards beside drafting ---


def interference(
    target: Path, draft: Path, dtype: str, threads: int, cores: list[int]
) -> dict[str, Interference]:
    """Interference by the cores of the draft model, which has one thread.

    `same_cores` is a core of the target. `other_cores` is another one, if there is one.
    """
    own, rest = cores[:threads], cores[threads:]
    runner = ModelRunner.load(str(target), dtype=dtype, threads=threads, page_count=64)
    before = os.sched_getaffinity(0)
    places = {"same_cores": own[:1]}
    if rest:
        places["other_cores"] = rest[:1]
    try:
        _pin(own)
        alone_s = _forward_s(runner)
        return {
            name: _beside(runner, alone_s, draft, dtype, place, own)
            for name, place in places.items()
        }
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
    arguments = ("draft", str(model), dtype, ",".join(map(str, place)))
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


def _beside(
    runner: ModelRunner, alone_s: float, draft: Path, dtype: str, place: list[int], own: list[int]
) -> Interference:
    with _drafting(draft, dtype, place) as (drafts_alone, speed_since):
        beside_s = _forward_s(runner)
        drafts_beside = speed_since()
    slowdown = drafts_alone / max(drafts_beside, 1e-9)
    return Interference(target=beside_s / alone_s, drafter=max(slowdown, 1e-9))


def _forward_s(runner: ModelRunner) -> float:
    """Mean seconds of a forward of one sequence.

    Two processes on a core take turns longer than a forward, so it is a mean of many.
    """
    return 1.0 / _rate(runner, lambda since: since > _WATCH_S)


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
    """Run one of the child processes."""
    kind, *rest = arguments
    if kind == "echo":
        asyncio.run(_echo(rest))
        return
    model, dtype, cores = rest
    for line in _draft(model, dtype, [int(core) for core in cores.split(",")]):
        print(line, flush=True)
    # The parent ends it.
    signal.pause()


if __name__ == "__main__":
    main(sys.argv[1:])
