"""Machines of `--hosts`, each reached through the agent that runs there.

`remote_hosts` holds the machines until its context ends. Then, or when the connection is lost, the
agents end all processes that they started.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from outrider.errors import invalid
from outrider.internal.v1 import agent_pb2, agent_pb2_grpc
from outrider.process import rpc
from outrider.process.roles import Role
from outrider.process.tls import Tls, explain
from outrider_bench.experiment.hosts import LOOPBACK, Host, Launch, LocalHost
from outrider_bench.experiment.records import Machine
from outrider_bench.experiment.spec import Experiment
from outrider_bench.experiment.tls import is_loopback, require_tls, split_address

_CALL_S = 20.0
"""Longer than the 12 s that a process has to stop."""


class RemoteHandle:
    """A process that an agent started."""

    def __init__(self, host: RemoteHost, process_id: str) -> None:
        self._host = host
        self._process_id = process_id

    async def alive(self) -> bool:
        """Ask the agent whether the process still runs; a paused one does."""
        return (await self._state()).is_alive

    async def stop(self) -> None:
        """Let the agent send SIGTERM, and SIGKILL after 12 s; return when it has ended."""
        await self._signal(agent_pb2.PROCESS_SIGNAL_STOP)

    async def kill(self) -> None:
        """Let the agent send SIGKILL; return when the process has ended."""
        await self._signal(agent_pb2.PROCESS_SIGNAL_KILL)

    async def pause(self) -> None:
        """Let the agent send SIGSTOP."""
        await self._signal(agent_pb2.PROCESS_SIGNAL_PAUSE)

    async def resume(self) -> None:
        """Let the agent send SIGCONT."""
        await self._signal(agent_pb2.PROCESS_SIGNAL_RESUME)

    async def tail(self) -> list[str]:
        """The last lines that the process printed, at most `TAIL_LINES`."""
        return list((await self._state()).tail)

    async def cpu_s(self) -> float:
        """User and system time in seconds since its start."""
        return (await self._state()).cpu_duration.ToNanoseconds() / 1e9

    async def _signal(self, signal: agent_pb2.ProcessSignal.ValueType) -> None:
        request = agent_pb2.SignalProcessRequest(process_id=self._process_id, signal=signal)
        await self._host.call("SignalProcess", request)

    async def _state(self) -> agent_pb2.GetProcessResponse:
        request = agent_pb2.GetProcessRequest(process_id=self._process_id)
        state: agent_pb2.GetProcessResponse = await self._host.call("GetProcess", request)
        return state


class RemoteHost:
    """A machine where an agent runs.

    Every method raises OSError with the reason when the agent refuses or the connection is lost.
    """

    def __init__(
        self, name: str, address: str, channel: grpc.aio.Channel, tls: Tls | None = None
    ) -> None:
        self.name = name
        self.address = address
        self.channel = channel
        self._tls = tls
        self._stub: Any = agent_pb2_grpc.AgentServiceStub(channel)
        self._lease: Any = self._stub.HoldMachine(
            agent_pb2.HoldMachineRequest(), wait_for_ready=False
        )
        self._held = agent_pb2.HoldMachineResponse()

    async def hold(self) -> None:
        """Reserve the machine."""
        try:
            async with asyncio.timeout(_CALL_S):
                held = await self._lease.read()
        except grpc.aio.AioRpcError as error:
            raise self._failure(error) from error
        except TimeoutError as error:
            reason = f"its agent did not answer within {_CALL_S:.0f} s"
            raise ConnectionError(f"host {self.name}: {reason}") from error
        self._held = rpc.readable(held)

    def release(self) -> None:
        """Give the machine back; the agent ends all processes."""
        self._lease.cancel()

    @property
    def machine(self) -> Machine:
        """The agent's description of its machine."""
        return machine_from_json(self._held.machine_json)

    @property
    def commit(self) -> str:
        """The commit that the agent runs."""
        return self._held.commit

    @property
    def controller_address(self) -> str:
        """The IP address of this machine, as the agent sees it."""
        return self._held.controller_address

    async def free_port(self) -> int:
        """A port that no process listens on now, at the machine's address."""
        answer = await self.call(
            "FindFreePort", agent_pb2.FindFreePortRequest(address=self.address)
        )
        return int(answer.port)

    async def start(self, launch: Launch) -> RemoteHandle:
        """Let the agent start the process; its cores are those of the remote machine."""
        request = agent_pb2.StartProcessRequest(
            name=launch.name,
            module=launch.module,
            program=launch.program,
            arguments=launch.arguments,
            environment=launch.environment,
            cores=launch.cores,
            files=launch.files,
        )
        answer = await self.call("StartProcess", request)
        return RemoteHandle(self, answer.process_id)

    async def call(self, method: str, request: Any) -> Any:
        """Call a method of the agent, with the id of the lease in the request."""
        request.lease_id = self._held.lease_id
        try:
            return rpc.readable(await getattr(self._stub, method)(request, timeout=_CALL_S))
        except grpc.aio.AioRpcError as error:
            raise self._failure(error) from error

    def _failure(self, error: grpc.aio.AioRpcError) -> OSError:
        reason = explain(rpc.error_of(error).message, self._tls)
        return ConnectionError(f"host {self.name}: {reason}")


@dataclass(frozen=True, slots=True)
class Hosts:
    """The machines of an experiment. `here` is this one, with an address that all others reach."""

    here: Host = field(default_factory=LocalHost)
    remote: Mapping[str, RemoteHost] = field(default_factory=dict)


def parse_hosts(text: str) -> dict[str, str]:
    """Addresses by name, from text such as `far=10.0.0.2:7070,near=127.0.0.1:7071`.

    Raises OutriderError(INVALID_VALUE) for any other text.
    """
    addresses: dict[str, str] = {}
    for part in text.split(",") if text else []:
        name, equals, address = part.strip().partition("=")
        if not name or not equals:
            raise invalid("hosts", f"must be NAME=HOST:PORT with commas between them, not {part!r}")
        if name in addresses:
            raise invalid("hosts", f"name {name} twice")
        split_address(f"hosts: {name}", address)
        addresses[name] = address
    return addresses


def check_hosts(experiments: Iterable[Experiment], addresses: Mapping[str, str]) -> None:
    """Check that the given hosts are those that the cells' experiments name.

    Raises OutriderError(INVALID_VALUE) that lists hosts without an address and unknown hosts.
    """
    named: set[str] = set()
    for experiment in experiments:
        hosts = [drafter.host for drafter in experiment.drafters.values()]
        named.update(host for host in (experiment.target.host, *hosts) if host is not None)
    missing = ", ".join(sorted(named - set(addresses)))
    unknown = ", ".join(sorted(set(addresses) - named))
    if missing:
        raise invalid("hosts", f"must give the address of {missing}, which the experiment names")
    if unknown:
        raise invalid("hosts", f"give {unknown}, which the experiment does not name")


@asynccontextmanager
async def remote_hosts(
    addresses: Mapping[str, str], tls: Tls | None, commit: str
) -> AsyncIterator[Hosts]:
    """Hold every machine until the context ends.

    Raises OutriderError(INVALID_VALUE) for an address that needs TLS and for an agent of another
    commit. Raises OSError when an agent cannot be reached or serves another experiment.
    """
    for name, address in addresses.items():
        require_tls(f"hosts: {name}", address, tls)
    async with AsyncExitStack() as stack:
        hosts: dict[str, RemoteHost] = {}
        for name, address in addresses.items():
            channel = await stack.enter_async_context(rpc.dial(address, tls, Role.AGENT))
            host = RemoteHost(name, split_address("hosts", address)[0], channel, tls)
            stack.callback(host.release)
            await host.hold()
            if host.commit != commit:
                problem = f"runs Outrider of commit {host.commit}, and this is {commit}"
                raise invalid(f"hosts: {name}", problem)
            hosts[name] = host
        yield with_addresses(hosts)


def with_addresses(hosts: Mapping[str, RemoteHost]) -> Hosts:
    """Give hosts on loopback an address that the other machines reach, if there are others."""
    seen = [host.controller_address for host in hosts.values() if not is_loopback(host.address)]
    here = LOOPBACK
    if seen:
        here = seen[0]
    for host in hosts.values():
        if is_loopback(host.address):
            host.address = here
    return Hosts(LocalHost(here), hosts)


def machine_from_json(text: str) -> Machine:
    """Read a Machine from JSON, in which the keys of NUMA nodes are text."""
    data = json.loads(text)
    data["numa_nodes"] = {int(node): cores for node, cores in data["numa_nodes"].items()}
    return Machine(**data)
