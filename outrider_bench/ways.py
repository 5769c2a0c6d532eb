"""The ways of decoding that `outrider lab bench` compares, each behind one call.

vLLM runs in a process of its own. Outrider's whole stack is called through its gateway's HTTP API.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from outrider.process.ports import free_port
from outrider_bench.experiment.hosts import Launch, LocalHost
from outrider_bench.experiment.launches import Endpoint
from outrider_bench.experiment.load import Asked, play
from outrider_bench.experiment.places import places
from outrider_bench.experiment.spec import Experiment, Workload
from outrider_bench.experiment.stack import backend, drafting
from outrider_bench.experiment.traffic import Request
from outrider_bench.sample import Sample


@dataclass(frozen=True, slots=True)
class Task:
    """Requests to decode greedily, `batch` at once; ends of text are ignored."""

    requests: list[Request]
    batch: int


Measure = Callable[[Task], Awaitable[Sample]]


@dataclass(frozen=True, slots=True)
class Pair:
    """A target, its draft model, and a head if there is one.

    Peers verify `draft_tokens` in a step; Outrider chooses its own number. `shared_threads` are the
    verifier's threads when a draft model runs on the same cores.
    """

    name: str
    target: Path
    draft: Path
    dtype: str
    draft_tokens: int
    shared_threads: int
    head: Path | None = None


@asynccontextmanager
async def line_peer(
    *command: str, environment: Mapping[str, str] = MappingProxyType({})
) -> AsyncIterator[Callable[[dict[str, Any]], Awaitable[Sample]]]:
    """Start a process, with these further variables, that answers each JSON line with one.

    Waits for the line with which the process says that it is ready. Processes that load at once
    would slow each other down, and vLLM's would write each other's compiled kernels. Raises
    RuntimeError with the end of the process's standard error if the process dies, as the call does.
    """
    with tempfile.TemporaryFile() as errors:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=-1, stdout=-1, stderr=errors, env={**os.environ, **environment}
        )
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("the peer has no pipes")
        send = process.stdin
        receive = process.stdout

        async def line() -> bytes:
            """The peer's next line; raises RuntimeError with its last words if it died."""
            read = await receive.readline()
            if not read:
                errors.seek(0)
                raise RuntimeError(f"{' '.join(command[:3])} died: {_tail(errors.read())}")
            return read

        async def ask(task: dict[str, Any]) -> Sample:
            """Send a task as a line, and read its sample."""
            send.write(json.dumps(task).encode() + b"\n")
            return Sample(**json.loads(await line()))

        try:
            await line()
            yield ask
        finally:
            with suppress(ProcessLookupError):  # it may have died by itself
                process.kill()
            # Unlike `wait`, this reads the remaining output, which closes the pipes.
            await process.communicate()


@asynccontextmanager
async def vllm_way(
    pair: Pair,
    python: Path,
    max_sequences: int,
    arguments: Sequence[str],
    drafter: Sequence[str] = (),
) -> AsyncIterator[Measure]:
    """vLLM in the virtual environment that `python` belongs to, with further arguments of its peer.

    With flags of a `drafter`, one dials its scheduler, which must be ours. Measuring then raises
    RuntimeError with the drafter's last words if it has died.
    """
    listen = f"127.0.0.1:{free_port()}"
    root = str(Path(__file__).parents[1])
    environment = _vllm_threads(python)
    if "--drafts" in arguments:
        environment |= {"OUTRIDER_VERIFIER_LISTEN": listen, "PYTHONPATH": root}
    peer = str(Path(__file__).with_name("vllm_peer.py"))
    command = [str(python), peer, str(pair.target), "--dtype", pair.dtype]
    command += ["--max-sequences", str(max_sequences), *arguments]
    async with line_peer(*command, environment=environment) as ask:
        handle = None
        if drafter:
            words = ("--verifier", listen, "--id", "1", *drafter)
            handle = await LocalHost().start(Launch("drafter", "drafter_svc", words))

        async def measure(task: Task) -> Sample:
            sample = await ask(_fields(task))
            if handle is not None and not await handle.alive():
                raise RuntimeError(f"the drafter died: {(await handle.tail())[-5:]}")
            return sample

        try:
            yield measure
        finally:
            if handle is not None:
                await handle.stop()


def _vllm_threads(python: Path) -> dict[str, str]:
    """Variables for threads as vLLM's own server starts them on CPUs: Intel's OpenMP, pinned.

    With another OpenMP, vLLM warns of slow speculation. A vLLM without that library gets none.
    """
    library = python.parents[1] / "lib" / "libiomp5.so"
    if not library.exists():
        return {}
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    return {
        "LD_PRELOAD": str(library),
        "KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{cores}]",
        "KMP_BLOCKTIME": "5",
        "KMP_TPAUSE": "0",
    }


def _tail(output: bytes) -> str:
    return output[-2000:].decode(errors="replace")


def _fields(task: Task) -> dict[str, Any]:
    return {
        "prompts": [request.prompt for request in task.requests],
        "batch": task.batch,
        "lengths": [request.output_tokens for request in task.requests],
    }


@asynccontextmanager
async def outrider_stack(
    pair: Pair, families: Sequence[str], threads: int
) -> AsyncIterator[Endpoint]:
    """Start a verifier, its gateway and a drafter of each family, as in an experiment.

    Raises StackFailed with the last lines of a process that does not start.
    """
    own: dict[str, dict[str, Any]] = {
        "model": {"model": pair.draft, "threads": 1},
        "head": {"model": pair.head, "threads": 1},
    }
    experiment = Experiment.model_validate(
        {
            "name": "bench",
            "target": {"model": pair.target, "dtype": pair.dtype, "threads": threads},
            "drafters": {family: {"family": family, **own.get(family, {})} for family in families},
            "use": list(families),
        }
    )
    async with (
        places([experiment], "") as found,
        backend(experiment.target, pair.target, found) as running,
        drafting(experiment, running, found),
    ):
        [endpoint] = running.endpoints
        yield endpoint


def outrider_way(endpoint: Endpoint, speculation: Mapping[str, Any]) -> Measure:
    """The way of decoding with a request's `speculation`."""
    return lambda task: _played(task, endpoint, speculation)


async def _played(task: Task, endpoint: Endpoint, speculation: Mapping[str, Any]) -> Sample:
    """Play a task at a gateway; raises RuntimeError with the first error of a request."""
    workload = Workload.model_validate({"batch": task.batch})
    asked = Asked(speculation, 0.0, "bench")
    played = await play(task.requests, workload, endpoint, asked)
    if played.errors:
        raise RuntimeError(played.errors[0])
    return played.sample
