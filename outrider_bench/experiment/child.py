"""Runs command lines as child processes on this machine.

This module deals with command lines, signals and CPU time, and knows nothing of the services.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from outrider.errors import invalid
from outrider.process.settings.cores import format_cores, parse_cores
from outrider_cli.supervisor import not_orphaned

LOOPBACK = "127.0.0.1"
TAIL_LINES = 50
_STOP_S = 12.0
_TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Launch:
    """A process to start: `python -m MODULE ARGUMENTS`, or `PROGRAM ARGUMENTS` without a module.

    Paths in arguments are relative to the checkout in which the process runs.
    """

    name: str
    module: str
    arguments: tuple[str, ...] = ()
    program: str = ""
    environment: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    cores: str | None = None
    """Cores that the process is pinned to, such as 0-3; None pins nothing."""

    def command(self) -> list[str]:
        """Return the words of the command line."""
        if self.module:
            return [sys.executable, "-m", self.module, *self.arguments]
        return [self.program, *self.arguments]


class Child:
    """A child process, in a separate process group. The task `ended` returns its exit status."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._lines: deque[str] = deque(maxlen=TAIL_LINES)
        self._cpu_s = 0.0
        self.ended = asyncio.create_task(self._watch())

    @property
    def pid(self) -> int:
        """The process's id, which is its group's id too."""
        return self._process.pid

    async def alive(self) -> bool:
        """Return whether the child still runs; a paused child counts as running."""
        return self._process.returncode is None

    async def stop(self) -> None:
        """Send SIGTERM to its group, then SIGKILL after 12 s if it still runs; await its end."""
        self.send_signal(signal.SIGTERM)
        self.send_signal(signal.SIGCONT)  # a paused process acts on SIGTERM only when it goes on
        _, late = await asyncio.wait({self.ended}, timeout=_STOP_S)
        if late:
            await self.kill()

    async def kill(self) -> None:
        """Send SIGKILL to its group; return when it has ended."""
        self.send_signal(signal.SIGKILL)
        await self.ended

    async def pause(self) -> None:
        """Send SIGSTOP to its group."""
        self.send_signal(signal.SIGSTOP)

    async def resume(self) -> None:
        """Send SIGCONT to its group."""
        self.send_signal(signal.SIGCONT)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process and its children."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    async def tail(self) -> list[str]:
        """Return the last `TAIL_LINES` lines that it printed; after its end, also its status."""
        return list(self._lines)

    async def cpu_s(self) -> float:
        """Return the user and system time in seconds since its start.

        After its end, return the last figure read.
        """
        # After the process has ended, the last figure counts.
        with suppress(FileNotFoundError, ProcessLookupError):
            self._cpu_s = process_cpu_s(self._process.pid)
        return self._cpu_s

    async def _watch(self) -> int:
        """Keep the last lines of output; return the status."""
        output = self._process.stdout
        while output is not None and (line := await _line(output)):
            self._lines.append(line.decode(errors="replace").rstrip())
        status = await self._process.wait()
        self._lines.append(f"ended with status {status}")
        return status


async def start(launch: Launch) -> Child:
    """Start a child process on the launch's cores; raise OSError when it cannot be run."""
    pinned = []
    if launch.cores is not None:
        pinned = ["taskset", "--cpu-list", launch.cores]
    process = await asyncio.create_subprocess_exec(
        *not_orphaned(),
        *pinned,
        *launch.command(),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, **launch.environment},
        # In a separate group: Ctrl-C then reaches only the runner, which stops processes in order.
        start_new_session=True,
    )
    return Child(process)


def check_cores(field_name: str, cores: str | None) -> None:
    """Raise OutriderError(INVALID_VALUE) if this process may not run on these cores."""
    mine = os.sched_getaffinity(0)
    if cores is not None and not set(parse_cores(cores, field_name)) <= mine:
        known = format_cores(sorted(mine))
        raise invalid(field_name, f"must be among {known} of this machine, not {cores}")


def process_cpu_s(pid: int) -> float:
    """Return the CPU seconds, user and system, of a process and of its ended children.

    Raises FileNotFoundError or ProcessLookupError when there is no such process.
    """
    return sum(_times(Path(f"/proc/{pid}/stat"))) / _TICK


def _times(stat: Path) -> list[int]:
    """Return the ticks of user and system time, then of ended children's user and system time."""
    # Fields are counted after the command's name, which may hold spaces (proc_pid_stat(5)).
    fields = stat.read_text().rpartition(")")[2].split()
    return [*map(int, fields[11:15])]


async def _line(output: asyncio.StreamReader) -> bytes:
    """Return the next line, or a piece of a line that is longer than the reader's buffer."""
    try:
        return await output.readline()
    except ValueError:
        return await output.read(1024)
