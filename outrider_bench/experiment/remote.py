"""Other machines of an experiment, reached over the system's ssh.

`remote_hosts` holds a connection to each machine until its context ends. Then, or when a connection
is lost, `remote_worker` at its far end ends all processes that it started there.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import shlex
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from outrider.errors import invalid
from outrider_bench.experiment.hosts import LOOPBACK, Host, Launch, LocalHost
from outrider_bench.experiment.records import Machine
from outrider_bench.experiment.remote_worker import SILENCE_S
from outrider_bench.experiment.spec import Experiment

_CALL_S = 20.0
"""Longer than the 12 s that a process has to stop."""
_CONNECT_S = 60.0
"""For ssh, and for Python to start on a slow machine."""


class RemoteHandle:
    """A process on another machine."""

    def __init__(self, host: RemoteHost, process: int) -> None:
        self._host = host
        self._process = process

    async def alive(self) -> bool:
        """As Handle.alive."""
        is_alive, _, _ = await self._call("state")
        return bool(is_alive)

    async def stop(self) -> None:
        """As Handle.stop."""
        await self._call("stop")

    async def kill(self) -> None:
        """As Handle.kill."""
        await self._call("kill")

    async def pause(self) -> None:
        """As Handle.pause."""
        await self._call("pause")

    async def resume(self) -> None:
        """As Handle.resume."""
        await self._call("resume")

    async def tail(self) -> list[str]:
        """As Handle.tail."""
        _, lines, _ = await self._call("state")
        return [str(line) for line in lines]

    async def cpu_s(self) -> float:
        """As Handle.cpu_s."""
        _, _, seconds = await self._call("state")
        return float(seconds)

    async def _call(self, method: str) -> Any:
        return await self._host.call(method, process=self._process)


class RemoteHost:
    """A machine at the far end of an ssh connection.

    Every method raises ConnectionError with the reason when the connection is lost.
    """

    def __init__(self, name: str, ssh: asyncio.subprocess.Process) -> None:
        self.name = name
        self.address = LOOPBACK
        self.controller_address = LOOPBACK
        self.commit = ""
        self.machine: Machine | None = None
        self._ssh = ssh
        self._ids = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def bind(self) -> str:
        """As Host.bind."""
        return self.address

    @property
    def here(self) -> str:
        """As Host.here."""
        return self.address

    async def open(self) -> None:
        """Wait for the machine's description."""
        try:
            async with asyncio.timeout(_CONNECT_S):
                line = await _stream(self._ssh.stdout).readline()
        except TimeoutError as error:
            raise self._lost(f"nothing came within {_CONNECT_S:.0f} s") from error
        if not line:
            raise self._lost(await self._last_error())
        try:
            described = json.loads(line)
            self.machine = machine_from_json(described["machine"])
        except (ValueError, KeyError, TypeError) as error:
            raise self._lost(f"it answers {line[:200].decode(errors='replace')!r}") from error
        self.commit = described["commit"]
        self.address = described["address"]
        self.controller_address = described["controller_address"]
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._ping())]

    async def close(self) -> None:
        """End the input of the far end, which then ends its processes, and wait for ssh."""
        for task in self._tasks:
            task.cancel()
        self._ssh.stdin.close()  # type: ignore[union-attr]  # it was opened as a pipe
        try:
            async with asyncio.timeout(_CALL_S):
                await self._ssh.wait()
        except TimeoutError:
            self._ssh.kill()
            await self._ssh.wait()

    async def free_port(self) -> int:
        """A port that no process listens on now, at the machine's address."""
        return int(await self.call("free_port"))

    async def start(self, launch: Launch) -> RemoteHandle:
        """Start a process; its cores are those of the other machine."""
        names = [each.name for each in dataclasses.fields(launch) if each.name != "shares"]
        given = {name: getattr(launch, name) for name in names}
        return RemoteHandle(self, await self.call("start", launch=given))

    async def call(self, method: str, **given: Any) -> Any:
        """Send a request and return its result; raises OSError with the reason that it has none."""
        number = next(self._ids)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._send({"id": number, "method": method, **given})
            async with asyncio.timeout(_CALL_S):
                return await answer
        except TimeoutError as error:
            raise self._lost(f"no answer came within {_CALL_S:.0f} s") from error
        finally:
            del self._waiting[number]

    def _send(self, request: Mapping[str, Any]) -> None:
        if self._ssh.returncode is not None:
            raise self._lost(f"ssh ended with status {self._ssh.returncode}")
        line = json.dumps(request, default=dict).encode() + b"\n"
        self._ssh.stdin.write(line)  # type: ignore[union-attr]  # it was opened as a pipe

    async def _read(self) -> None:
        """Hand answers to those who wait for them, until the connection ends."""
        while line := await _stream(self._ssh.stdout).readline():
            answer = json.loads(line)
            waiting = self._waiting.get(answer["id"])
            if waiting is None or waiting.done():
                continue
            if "error" in answer:
                waiting.set_exception(OSError(f"host {self.name}: {answer['error']}"))
            else:
                waiting.set_result(answer["result"])
        reason = await self._last_error()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(self._lost(reason))

    async def _ping(self) -> None:
        """Keep the far end from taking this one for dead."""
        while self._ssh.returncode is None:
            self._send({"method": "ping"})
            await asyncio.sleep(SILENCE_S / 4)

    async def _last_error(self) -> str:
        """What ssh said last; the connection has ended."""
        lines = (await _stream(self._ssh.stderr).read()).decode(errors="replace").split("\n")
        said = [line.strip() for line in lines if line.strip()]
        return said[-1] if said else "the connection ended"

    def _lost(self, reason: str) -> ConnectionError:
        return ConnectionError(f"host {self.name}: {reason}")


@dataclass(frozen=True, slots=True)
class Hosts:
    """The machines of an experiment. `here` is this one, with an address that all others reach."""

    here: Host = field(default_factory=LocalHost)
    remote: Mapping[str, RemoteHost] = field(default_factory=dict)


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
async def remote_hosts(targets: Mapping[str, str], commit: str) -> AsyncIterator[Hosts]:
    """Hold a connection to every machine until the context ends.

    The system's ssh reaches them, so options such as a port stand in ~/.ssh/config. Raises
    OutriderError(INVALID_VALUE) for a wrong target and for a checkout of another commit; OSError
    when a machine cannot be reached.
    """
    places = {name: split_target(name, target) for name, target in targets.items()}
    async with AsyncExitStack() as stack:
        hosts: dict[str, RemoteHost] = {}
        for name, (destination, directory) in places.items():
            host = RemoteHost(name, await _connect(destination, directory))
            stack.push_async_callback(host.close)
            await host.open()
            if host.commit != commit:
                problem = f"has Outrider of commit {host.commit}, and this is {commit}"
                raise invalid(f"hosts.{name}", problem)
            hosts[name] = host
        yield with_addresses(hosts)


async def _connect(destination: str, directory: str) -> asyncio.subprocess.Process:
    worker = "exec .venv/bin/python -m outrider_bench.experiment.remote_worker"
    return await asyncio.create_subprocess_exec(
        "ssh",
        "-T",
        # Nobody answers a question for a password.
        "-oBatchMode=yes",
        destination,
        f"cd {shlex.quote(directory)} && {worker}",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=2**24,
        # Ctrl-C reaches the runner alone, which stops all in order.
        start_new_session=True,
    )


def with_addresses(hosts: Mapping[str, RemoteHost]) -> Hosts:
    """Give hosts on loopback an address that the other machines reach, if there are others."""
    seen = [host.controller_address for host in hosts.values() if host.address != LOOPBACK]
    here = LOOPBACK
    if seen:
        here = seen[0]
    for host in hosts.values():
        if host.address == LOOPBACK:
            host.address = here
    return Hosts(LocalHost(here), hosts)


def machine_from_json(data: dict[str, Any]) -> Machine:
    """A Machine from its JSON object, in which the keys of NUMA nodes are text."""
    numa_nodes = {int(node): cores for node, cores in data["numa_nodes"].items()}
    return Machine(**{**data, "numa_nodes": numa_nodes})


def _stream(stream: asyncio.StreamReader | None) -> asyncio.StreamReader:
    if stream is None:
        raise RuntimeError("ssh has no pipe")
    return stream
