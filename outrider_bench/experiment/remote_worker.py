"""The far end of an ssh connection: starts and stops an experiment's processes on its machine.

`python -m outrider_bench.experiment.remote_worker` reads requests from standard input, one JSON
object on each line, and writes answers to standard output. The first line that it writes describes
the machine. When its input ends, or is silent for 20 s, it ends all processes that it started.
`remote` has the near end.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from outrider_bench.experiment.hosts import LOOPBACK, Launch, LocalHandle, LocalHost
from outrider_bench.experiment.machine import commit, this_machine

SILENCE_S = 20.0
"""The near end sends a line more often than this while it lives."""
SIGNALS = ("stop", "kill", "pause", "resume")

_ROOT = Path(__file__).parents[2]


class Worker:
    """The processes of one experiment on this machine."""

    def __init__(self) -> None:
        self._address = _server_address()
        self._host = LocalHost(self._address)
        self._handles: list[LocalHandle] = []

    def describe(self) -> dict[str, Any]:
        """This machine, its commit, and the addresses of both ends of the connection."""
        return {
            "machine": asdict(this_machine()),
            "commit": commit(_ROOT),
            "address": self._address,
            "controller_address": _client_address(),
        }

    async def answer(self, request: dict[str, Any]) -> Any:
        """Do what a request asks; raises OSError if a process or a port cannot be had."""
        method = request["method"]
        if method == "free_port":
            return await self._host.free_port()
        if method == "start":
            launch = Launch(**request["launch"])
            self._handles.append(await self._host.start(launch))
            return len(self._handles) - 1
        handle = self._handles[request["process"]]
        if method == "state":
            return [await handle.alive(), await handle.tail(), await handle.cpu_s()]
        if method not in SIGNALS:
            raise ValueError(f"no method {method!r}")
        await getattr(handle, method)()
        return None

    async def close(self) -> None:
        """Stop all processes at the same time."""
        await asyncio.gather(*(handle.stop() for handle in self._handles))


async def serve(worker: Worker) -> None:
    """Answer requests until the input ends or is silent; then end the worker's processes."""
    reader = asyncio.StreamReader(limit=2**24)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    tasks: set[asyncio.Task[None]] = set()
    _write(worker.describe())
    try:
        while line := await _next_line(reader):
            request = json.loads(line)
            if request["method"] != "ping":
                task = asyncio.create_task(_reply(worker, request))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
    finally:
        await asyncio.gather(*tasks, return_exceptions=True)
        await worker.close()


async def _next_line(reader: asyncio.StreamReader) -> bytes:
    try:
        async with asyncio.timeout(SILENCE_S):
            return await reader.readline()
    except TimeoutError:
        return b""


async def _reply(worker: Worker, request: dict[str, Any]) -> None:
    answer: dict[str, Any] = {"id": request["id"]}
    try:
        answer["result"] = await worker.answer(request)
    except OSError as error:
        answer["error"] = str(error.strerror or error)
    _write(answer)


def _write(answer: dict[str, Any]) -> None:
    # The near end may be gone. The end of the input says so too.
    try:
        print(json.dumps(answer), flush=True)
    except BrokenPipeError:
        pass


def _client_address() -> str:
    """The near end's IP address, as sshd gives it (sshd(8), SSH_CONNECTION)."""
    return os.environ.get("SSH_CONNECTION", LOOPBACK).split()[0]


def _server_address() -> str:
    words = os.environ.get("SSH_CONNECTION", "").split()
    return words[2] if len(words) == 4 else LOOPBACK


if __name__ == "__main__":
    # Models are named by their paths in the checkout.
    os.chdir(_ROOT)
    asyncio.run(serve(Worker()))
