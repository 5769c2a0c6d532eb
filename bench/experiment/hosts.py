"""Where an experiment's processes run: the seam, and this machine as child processes.

Knows command lines, signals and CPU time; not what a process does. A container engine or an agent on another machine
implements `Host` and `Handle` too.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from outrider.errors import invalid
from outrider.launch.stack import free_port
from outrider.launch.supervisor import not_orphaned
from outrider.process.cores import format_cores, parse_cores

FILES = "{files}"
"""In an argument, the directory where the host wrote the files of the launch."""

TAIL_LINES = 50
_STOP_S = 12.0
_TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Launch:
    """A process to start: `python -m MODULE ARGUMENTS`, or a program where `module` is empty.

    Paths in arguments are those of the checkout that it runs in. `shares` are directories that it needs under the same
    path as here, such as one of Unix sockets or of models; a container mounts them. `files` are small texts by name, for
    secrets and the like; `{files}/NAME` in an argument becomes the path that the host wrote one to.
    """

    name: str
    module: str
    arguments: tuple[str, ...] = ()
    program: str = ""
    environment: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    cores: str | None = None
    """Cores that the host pins it to, such as 0-3; None leaves it to the system, or to the process itself."""
    is_container: bool = False
    shares: tuple[Path, ...] = ()
    files: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def command(self, files: str, python: str = sys.executable) -> list[str]:
        """The words of the command line, with the directory that `files` were written to."""
        words = [python, "-m", self.module] if self.module else [self.program]
        return [*words, *(argument.replace(FILES, files) for argument in self.arguments)]


class Handle(Protocol):
    """A process that was started. Signals to one that has ended do nothing."""

    @property
    def name(self) -> str:
        """The launch's."""
        ...

    async def alive(self) -> bool:
        """Whether it still runs, paused or not."""
        ...

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL if it has not ended after 12 s; returns when it has ended."""
        ...

    async def kill(self) -> None:
        """SIGKILL; returns when it has ended."""
        ...

    async def pause(self) -> None:
        """SIGSTOP."""
        ...

    async def resume(self) -> None:
        """SIGCONT."""
        ...

    async def tail(self) -> list[str]:
        """The last lines that it printed, at most `TAIL_LINES`."""
        ...

    async def cpu_s(self) -> float:
        """CPU time in seconds, of user and system, that it has used since its start."""
        ...


class Host(Protocol):
    """A machine, or a container engine on one."""

    @property
    def address(self) -> str:
        """Name or IP address under which the experiment's other processes reach what listens here."""
        ...

    async def free_port(self) -> int:
        """A port that nothing listens on now; the next process that is started here may listen on it."""
        ...

    async def start(self, launch: Launch) -> Handle:
        """Start a process; raises OSError, with the reason, when it cannot be run."""
        ...


class Places(Protocol):
    """Finds the host of each process of an experiment."""

    @property
    def here(self) -> str:
        """IP address of this machine under which all processes reach it."""
        ...

    def host(self, name: str, machine: str | None, is_container: bool) -> Host:
        """Where to start the process `name`, such as verifier-1 or link-wire: on `machine` (None is this one).

        Raises OutriderError(INVALID_VALUE) for a machine that is not known, or containers that cannot be had.
        """
        ...


class LocalHandle:
    """A child process, in a process group of its own."""

    def __init__(
        self,
        name: str,
        process: asyncio.subprocess.Process,
        files: tempfile.TemporaryDirectory[str] | None,
    ) -> None:
        self._name = name
        self._process = process
        self._files = files
        self._lines: deque[str] = deque(maxlen=TAIL_LINES)
        self._cpu_s = 0.0
        self._ended = asyncio.create_task(self._watch())

    @property
    def name(self) -> str:
        return self._name

    @property
    def pid(self) -> int:
        return self._process.pid

    async def alive(self) -> bool:
        return self._process.returncode is None

    async def stop(self) -> None:
        self._signal(signal.SIGTERM)
        self._signal(signal.SIGCONT)  # a paused process takes no other signal
        try:
            await asyncio.wait_for(asyncio.shield(self._ended), _STOP_S)
        except TimeoutError:
            await self.kill()

    async def kill(self) -> None:
        self._signal(signal.SIGKILL)
        await self._ended

    async def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    async def resume(self) -> None:
        self._signal(signal.SIGCONT)

    async def tail(self) -> list[str]:
        return list(self._lines)

    async def cpu_s(self) -> float:
        with suppress(
            FileNotFoundError, ProcessLookupError
        ):  # it has ended; the last figure stands
            self._cpu_s = process_cpu_s(self._process.pid)
        return self._cpu_s

    def _signal(self, number: signal.Signals) -> None:
        """Signal the process and whatever it started."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    async def _watch(self) -> None:
        """Keep the last lines, and take leave of the process when it ends."""
        output = self._process.stdout
        while output is not None and (line := await _line(output)):
            self._lines.append(line.decode(errors="replace").rstrip())
        status = await self._process.wait()
        self._lines.append(f"ended with status {status}")
        if self._files is not None:
            self._files.cleanup()


class LocalHost:
    """This machine."""

    address = "127.0.0.1"

    async def free_port(self) -> int:
        return free_port(self.address)

    async def start(self, launch: Launch) -> LocalHandle:
        """Start a child process, pinned to the launch's cores; raises OSError when it cannot be run."""
        files = _write(launch.files) if launch.files else None
        pinned = ["taskset", "--cpu-list", launch.cores] if launch.cores is not None else []
        process = await asyncio.create_subprocess_exec(
            *not_orphaned(),
            *pinned,
            *launch.command(files.name if files is not None else ""),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, **launch.environment},
            # A group of its own: Ctrl-C in a terminal reaches the runner alone, which then stops everyone in order.
            start_new_session=True,
        )
        return LocalHandle(launch.name, process, files)


class LocalPlaces:
    """All processes on this machine, none in a container."""

    here = "127.0.0.1"

    def host(self, name: str, machine: str | None, is_container: bool) -> Host:
        """This machine; raises OutriderError(INVALID_VALUE) for any other, and for a container."""
        if machine is not None:
            raise invalid(
                "host", f"{machine} of {name} needs --hosts with the address of its agent"
            )
        if is_container:
            raise invalid("container", f"{name} needs a container engine: give --with compose")
        return LocalHost()


def _write(files: Mapping[str, str]) -> tempfile.TemporaryDirectory[str]:
    """A directory, for this user alone, with the files."""
    directory = tempfile.TemporaryDirectory(prefix="outrider-")
    for name, text in files.items():
        Path(directory.name, name).write_text(text)
    return directory


def check_cores(field_name: str, cores: str | None) -> None:
    """Raises OutriderError(INVALID_VALUE) that names the field unless this process may run on these cores."""
    mine = os.sched_getaffinity(0)
    if cores is not None and not set(parse_cores(cores, field_name)) <= mine:
        raise invalid(
            field_name, f"must be among {format_cores(sorted(mine))} of this machine, not {cores}"
        )


def process_cpu_s(pid: int) -> float:
    """User and system time in seconds of a process of this machine and of its children that ended.

    Raises FileNotFoundError or ProcessLookupError when there is no such process.
    """
    # The command's name, in parentheses, may hold anything; fields are counted behind it (proc_pid_stat(5)).
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / _TICK


async def _line(output: asyncio.StreamReader) -> bytes:
    """The next line; of one that is longer than the reader's buffer, a piece."""
    try:
        return await output.readline()
    except ValueError:
        return await output.read(1024)
