"""Helpers of tests with agents: `outrider agent` in a process, and a light process to start."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import waiting

from outrider.process.ports import free_port
from outrider_bench.experiment.hosts import Launch
from outrider_bench.experiment.remote import Hosts, remote_hosts

OUTRIDER = (sys.executable, "-m", "outrider.launch.cli")
ROOT = Path(__file__).parents[2]
PATIENCE_S = 20.0


@dataclass
class Agent:
    process: asyncio.subprocess.Process
    address: str
    commit: str


@asynccontextmanager
async def agent(*flags: str) -> AsyncIterator[Agent]:
    """`outrider agent` on a free port of the loopback interface."""
    command = [*OUTRIDER, "agent", "--listen", "127.0.0.1:0", *flags]
    process = await asyncio.create_subprocess_exec(
        *command, cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        line = (await asyncio.wait_for(process.stdout.readline(), 60)).decode()
        words = line.split()
        yield Agent(process, words[3], words[-1])
    finally:
        if process.returncode is None:
            process.terminate()
        await process.communicate()


def held(near: Agent) -> AbstractAsyncContextManager[Hosts]:
    """The machine of an agent, as the host `near`."""
    return remote_hosts({"near": near.address}, None, near.commit)


def proxy(name: str = "proxy", **more: object) -> tuple[Launch, int]:
    """A light process of Outrider, and the port that it listens on while it runs."""
    control, listen = free_port("127.0.0.1"), free_port("127.0.0.1")
    forward = f"127.0.0.1:{listen}=127.0.0.1:1"
    arguments = ("--control", f"127.0.0.1:{control}", "--forward", forward)
    return Launch(name, "outrider_bench.experiment.link_process", arguments, **more), control  # type: ignore[arg-type]


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


async def until(holds: Callable[[], bool]) -> None:
    async def asked() -> bool:
        return holds()

    await waiting.until(asked)
