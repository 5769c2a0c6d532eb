"""vLLM beside an experiment of `outrider lab bench`: its own ways of drafting, and those with ours.

It runs in processes of its own. Each takes the requests of a workload as one line.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from outrider.process.network.ports import free_port
from outrider_bench.experiment.hosts import Launch, LocalHost
from outrider_bench.experiment.launches import SYNTHETIC_PATH
from outrider_bench.experiment.run import Peer
from outrider_bench.experiment.traffic import Request
from outrider_bench.sample import Sample

Ask = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
"""Sends a task to a process, and returns its answer."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and its draft model. vLLM verifies `draft_tokens` in a step."""

    name: str
    target: Path
    draft: Path
    dtype: str
    draft_tokens: int
    threads: int
    """Of our verifier, which chooses its own number of draft tokens."""


def ways(pair: Pair) -> dict[str, tuple[list[str], list[str]]]:
    """vLLM's own ways, and those with our scheduler: flags of its process, and of our drafter."""
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


@asynccontextmanager
async def started(pair: Pair, way: str, python: Path, max_sequences: int) -> AsyncIterator[Peer]:
    """Start vLLM in the virtual environment that `python` belongs to, with the flags of a way.

    With our drafter, it dials vLLM's scheduler, which is ours. Decoding then raises RuntimeError
    with the drafter's last words if it has died.
    """
    arguments, drafter = ways(pair)[way]
    listen = f"127.0.0.1:{free_port()}"
    environment = {}
    if "--drafts" in arguments:
        root = str(Path(__file__).parents[1])
        environment = {"OUTRIDER_VERIFIER_LISTEN": listen, "PYTHONPATH": root}
    flags = ["--dtype", pair.dtype, "--max-sequences", str(max_sequences), *arguments]
    async with process(python, pair.target, flags, environment) as ask:
        handle = None
        if drafter:
            words = ("--verifier", listen, "--id", "1", *drafter)
            handle = await LocalHost().start(Launch("drafter", "drafter_svc", words))

        async def decode(requests: Sequence[Request], batch: int) -> Sample:
            prompts = [request.prompt for request in requests]
            lengths = [request.output_tokens for request in requests]
            task = {"prompts": prompts, "batch": batch, "lengths": lengths}
            sample = Sample(**(await ask(task))["sample"])
            if handle is not None and not await handle.alive():
                raise RuntimeError(f"the drafter died: {(await handle.tail())[-5:]}")
            return sample

        try:
            yield decode
        finally:
            if handle is not None:
                await handle.stop()


def process(
    python: Path,
    target: Path,
    flags: Sequence[str],
    environment: Mapping[str, str] = MappingProxyType({}),
) -> AbstractAsyncContextManager[Ask]:
    """Start vllm_peer.py with the Python of vLLM's virtual environment, as `line_peer` does."""
    peer = str(Path(__file__).with_name("vllm_peer.py"))
    variables = {**_vllm_threads(python), **environment}
    return line_peer(str(python), peer, str(target), *flags, environment=variables)


@asynccontextmanager
async def line_peer(
    *command: str, environment: Mapping[str, str] = MappingProxyType({})
) -> AsyncIterator[Ask]:
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

        async def ask(task: dict[str, Any]) -> dict[str, Any]:
            """Send a task as a line, and read its answer."""
            send.write(json.dumps(task).encode() + b"\n")
            answer: dict[str, Any] = json.loads(await line())
            return answer

        try:
            await line()
            yield ask
        finally:
            with suppress(ProcessLookupError):  # it may have died by itself
                process.kill()
            # Unlike `wait`, this reads the remaining output, which closes the pipes.
            await process.communicate()


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
