"""Starts other programs in separate processes, which answer each line with a line."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

Ask = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
"""Sends a task to a process, and returns its answer."""


class PeerDied(RuntimeError):
    """Another program has ended by itself. The message has the program's last lines."""


def vllm_process(
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
    """Start a process that answers each JSON line with a JSON line; it also gets `environment`.

    Waits for the line with which the process says that it is ready, because processes that load at
    the same time would slow each other down. Two processes of vLLM would also overwrite each
    other's compiled kernels.
    The start and every later question raise PeerDied, with the end of the process's standard error,
    if the process dies.
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
            """Return the peer's next line. Raises PeerDied with its last lines if it died."""
            read = await receive.readline()
            if not read.endswith(b"\n"):
                errors.seek(0)
                raise PeerDied(f"{' '.join(command[:3])} died: {_tail(errors.read())}")
            return read

        async def ask(task: dict[str, Any]) -> dict[str, Any]:
            """Send a task as a line, and read its answer; raise PeerDied if it died."""
            send.write(json.dumps(task).encode() + b"\n")
            answer: dict[str, Any] = json.loads(await line())
            return answer

        try:
            await line()
            yield ask
        finally:
            with suppress(ProcessLookupError):  # it may have died by itself
                process.kill()
            # Unlike `wait`, this reads the remaining output, and so closes the pipes.
            await process.communicate()


def _vllm_threads(python: Path) -> dict[str, str]:
    """Return environment variables that load Intel's OpenMP into vLLM and pin vLLM's CPU threads.

    vLLM's server uses the same variables. With another OpenMP, vLLM warns of slow speculation. If
    Intel's OpenMP is not installed beside vLLM, there are no variables.
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
