"""Other machines of an experiment, reached over the system's ssh.

Each process there has a connection of its own. `remote_worker` at the far end ends the process with
the connection.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shlex
import signal
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from outrider.errors import invalid
from outrider_bench.experiment.hosts import LOOPBACK, Launch, LocalHandle, LocalHost
from outrider_bench.experiment.records import Machine
from outrider_bench.experiment.remote_worker import CPU, SILENCE_S
from outrider_bench.experiment.spec import Experiment

_CALL_S = 20.0
"""How long a far end may take to answer."""
_CONNECT_S = 60.0
"""For ssh, and for Python to start on a slow machine."""
_SSH = (
    "ssh",
    "-T",
    # Nobody answers a question for a password.
    "-oBatchMode=yes",
    f"-oServerAliveInterval={SILENCE_S / 4:.0f}",
    "-oServerAliveCountMax=3",
)
_FREE_PORT = "import socket; print(socket.create_server(({!r}, 0)).getsockname()[1])"


class RemoteHandle(LocalHandle):
    """A process on another machine. The child here is ssh, whose input takes a word a line."""

    def __init__(self, process: asyncio.subprocess.Process, launch: Mapping[str, Any]) -> None:
        super().__init__(process)
        self._answered = asyncio.Event()
        self._say(json.dumps(launch, default=dict))
        self._tasks = [asyncio.create_task(self._ping()), asyncio.create_task(self._listen())]

    def send_signal(self, number: signal.Signals) -> None:
        """Let the far end send a signal to the process and its children."""
        self._say(number.name)

    async def kill(self) -> None:
        """As LocalHandle.kill. If the far end does nothing, ends the connection."""
        self.send_signal(signal.SIGKILL)
        _, late = await asyncio.wait({self.ended}, timeout=_CALL_S)
        if late:
            self._process.kill()
        await self.ended

    async def cpu_s(self) -> float:
        """As Handle.cpu_s; the last one read, once the process has ended."""
        self._answered.clear()
        self._say(CPU)
        answer = asyncio.create_task(self._answered.wait())
        await asyncio.wait(
            {answer, self.ended}, timeout=_CALL_S, return_when=asyncio.FIRST_COMPLETED
        )
        answer.cancel()
        return self._cpu_s

    def _say(self, word: str) -> None:
        if self._process.returncode is None:
            self._process.stdin.write(f"{word}\n".encode())  # type: ignore[union-attr]  # a pipe

    async def _ping(self) -> None:
        """Keep the far end from taking this one for dead."""
        while self._process.returncode is None:
            self._say("")
            await asyncio.sleep(SILENCE_S / 4)

    async def _listen(self) -> None:
        """Take the far end's answers; other lines are errors of ssh or of the far end itself."""
        while line := await self._process.stderr.readline():  # type: ignore[union-attr]  # a pipe
            word, _, value = line.decode(errors="replace").strip().partition(" ")
            if word == CPU:
                self._cpu_s = float(value)
                self._answered.set()
            else:
                self._lines.append(f"{word} {value}".strip())


class RemoteHost:
    """Another machine, with a checkout in `directory`."""

    def __init__(self, name: str, destination: str, directory: str) -> None:
        self.name = name
        self.address = self.bind = self.here = LOOPBACK
        self.controller_address = LOOPBACK
        self.commit = ""
        self.machine: Machine | None = None
        self._destination = destination
        self._directory = directory
        self._handles: list[RemoteHandle] = []

    async def open(self) -> None:
        """Ask for the machine's description; raises ConnectionError with the reason."""
        line = await self._ask("-m", "outrider_bench.experiment.remote_worker", "describe")
        try:
            described = json.loads(line)
            self.machine = Machine(**described["machine"])
        except (ValueError, KeyError, TypeError) as error:
            raise ConnectionError(f"host {self.name}: it answers {line[:200]!r}") from error
        self.commit = described["commit"]
        self.address = self.bind = self.here = described["address"]
        self.controller_address = described["controller_address"]

    async def close(self) -> None:
        """End the processes that were started here and still run."""
        await asyncio.gather(*(handle.stop() for handle in self._handles))

    async def free_port(self) -> int:
        """A port that no process listens on now, at the machine's address."""
        return int(await self._ask("-c", _FREE_PORT.format(self.address)))

    async def start(self, launch: Launch) -> RemoteHandle:
        """Start a process; its cores are those of the other machine."""
        names = [each.name for each in dataclasses.fields(launch) if each.name != "shares"]
        process = await self._python("-m", "outrider_bench.experiment.remote_worker", "run")
        handle = RemoteHandle(process, {name: getattr(launch, name) for name in names})
        self._handles.append(handle)
        return handle

    async def _ask(self, *arguments: str) -> str:
        """What Python prints there; raises ConnectionError with the last error, if there is one."""
        process = await self._python(*arguments)
        try:
            async with asyncio.timeout(_CONNECT_S):
                output, errors = await process.communicate()
        except TimeoutError as error:
            process.kill()
            reason = f"nothing came within {_CONNECT_S:.0f} s"
            raise ConnectionError(f"host {self.name}: {reason}") from error
        if process.returncode != 0:
            said = errors.decode(errors="replace").split("\n")
            lines = [line.strip() for line in said if line.strip()] or ["the connection ended"]
            raise ConnectionError(f"host {self.name}: {lines[-1]}")
        return output.decode(errors="replace")

    async def _python(self, *arguments: str) -> asyncio.subprocess.Process:
        """Run the Python of the checkout there."""
        command = f"exec .venv/bin/python {shlex.join(arguments)}"
        return await asyncio.create_subprocess_exec(
            *_SSH,
            self._destination,
            f"cd {shlex.quote(self._directory)} && {command}",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            # Ctrl-C reaches the runner alone, which stops all in order.
            start_new_session=True,
        )


def split_target(name: str, text: str) -> tuple[str, str]:
    """The ssh destination and the checkout's directory, of text such as me@10.0.0.2:outrider.

    Raises OutriderError(INVALID_VALUE) for any other text.
    """
    destination, colon, directory = text.partition(":")
    # A destination that begins with a dash would be an option of ssh.
    if not destination or destination.startswith("-") or not colon or not directory:
        form = "an ssh destination and a directory, such as me@far:outrider"
        raise invalid(f"hosts.{name}", f"must be {form}, not {text!r}")
    return destination, directory


def used_hosts(experiments: Iterable[Experiment]) -> dict[str, str]:
    """The ssh targets of all machines on which the cells' experiments place a process.

    Raises OutriderError(INVALID_VALUE) for a machine that is not in the file's `hosts`.
    """
    used: dict[str, str] = {}
    for experiment in experiments:
        places = {"target": experiment.target.host}
        places |= {f"drafters.{name}": each.host for name, each in experiment.drafters.items()}
        for place, name in places.items():
            if name is None:
                continue
            if name not in experiment.hosts:
                raise invalid("hosts", f"must have {name}, which {place}.host names")
            used[name] = experiment.hosts[name]
    return used


@asynccontextmanager
async def remote_hosts(
    targets: Mapping[str, str], commit: str
) -> AsyncIterator[dict[str, RemoteHost]]:
    """Know every machine, and its processes until the context ends.

    The system's ssh reaches them, so options such as a port stand in ~/.ssh/config. Raises
    OutriderError(INVALID_VALUE) for a wrong target and for a checkout of another commit; OSError
    when a machine cannot be reached.
    """
    places = {name: split_target(name, target) for name, target in targets.items()}
    async with AsyncExitStack() as stack:
        hosts: dict[str, RemoteHost] = {}
        for name, (destination, directory) in places.items():
            host = RemoteHost(name, destination, directory)
            stack.push_async_callback(host.close)
            await host.open()
            if host.commit != commit:
                problem = f"has Outrider of commit {host.commit}, and this is {commit}"
                raise invalid(f"hosts.{name}", problem)
            hosts[name] = host
        yield hosts


def local_host(others: Mapping[str, RemoteHost]) -> LocalHost:
    """This machine, at an address that the other machines reach, if there are other machines.

    Machines that ssh reaches on loopback get the same address.
    """
    seen = [host.controller_address for host in others.values() if host.address != LOOPBACK]
    here = seen[0] if seen else LOOPBACK
    for host in others.values():
        if host.address == LOOPBACK:
            host.address = host.bind = host.here = here
    return LocalHost(here)
