"""The agent's gRPC service.

One controller at a time has a lease. Its processes end with the lease.
"""

from __future__ import annotations

import asyncio
import ipaddress
import secrets
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import unquote

from google.protobuf.duration_pb2 import Duration

from outrider.errors import OutriderError, Reason, invalid
from outrider.internal.v1 import agent_pb2, agent_pb2_grpc
from outrider.process.ports import free_port
from outrider.process.rpc import reports_errors
from outrider_bench.experiment.hosts import Handle, Launch, LocalHost
from outrider_bench.experiment.permitted import check_launch

SERVICE = "outrider.internal.v1.AgentService"
MAX_PROCESSES = 256
"""Most processes of a lease, including those that ended."""

_Context = Any


class Lease:
    """The processes that one controller started."""

    def __init__(self) -> None:
        self.lease_id = secrets.token_urlsafe(16)
        self.handles: dict[str, Handle] = {}
        self._host = LocalHost()
        self._has_ended = False

    async def start(self, launch: Launch) -> str:
        """Start a process and return its id; raises OutriderError when it cannot be run."""
        if len(self.handles) >= MAX_PROCESSES:
            limit = f"more than {MAX_PROCESSES} processes of one lease"
            raise invalid("name", f"{launch.name} would be {limit}")
        try:
            handle = await self._host.start(launch)
        except OSError as error:
            reason = error.strerror or error
            raise invalid("program", f"of {launch.name} cannot be run: {reason}") from error
        if self._has_ended:
            await handle.kill()
            raise OutriderError(Reason.CLIENT_GONE, "the lease ended while the process started")
        process_id = f"{launch.name}-{len(self.handles)}"
        self.handles[process_id] = handle
        return process_id

    def process(self, process_id: str) -> Handle:
        """The process with this id; raises OutriderError(INVALID_VALUE) if there is none."""
        handle = self.handles.get(process_id)
        if handle is None:
            raise invalid("process_id", f"{process_id[:100]!r} is none of this lease's processes")
        return handle

    async def end(self) -> None:
        """Stop all processes at the same time."""
        self._has_ended = True
        await asyncio.gather(*(handle.stop() for handle in self.handles.values()))


class AgentServicer(agent_pb2_grpc.AgentServiceServicer):
    """Serves one lease at a time. Every call but HoldMachine must name the present lease."""

    def __init__(self, machine_json: str, commit: str) -> None:
        self._machine_json = machine_json
        self._commit = commit
        self._lease: Lease | None = None
        self._ending: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """End the processes that still run."""
        self._end_lease()
        if self._ending is not None:
            await self._ending

    @reports_errors
    async def HoldMachine(
        self, request: agent_pb2.HoldMachineRequest, context: _Context
    ) -> AsyncIterator[agent_pb2.HoldMachineResponse]:
        """Hold the machine for the caller until the call ends; then end its processes.

        Answers once, with the lease and the machine's description. Raises OutriderError(OVERLOADED)
        if another experiment holds the machine.
        """
        if self._lease is not None:
            problem = "another experiment holds this machine, and an agent serves one at a time"
            raise OutriderError(Reason.OVERLOADED, problem)
        lease = self._lease = Lease()
        # gRPC calls this however the call ends, also when the connection is lost.
        context.add_done_callback(lambda _: self._end_lease())
        yield agent_pb2.HoldMachineResponse(
            lease_id=lease.lease_id,
            machine_json=self._machine_json,
            commit=self._commit,
            controller_address=peer_address(context.peer()),
        )
        await asyncio.Event().wait()

    def _end_lease(self) -> None:
        """Begin to end the lease. The machine is free once the last process has ended."""
        if self._ending is None and self._lease is not None:
            self._ending = asyncio.create_task(self._end(self._lease))

    async def _end(self, lease: Lease) -> None:
        try:
            await lease.end()
        finally:
            self._lease = self._ending = None

    def _held(self, lease_id: str) -> Lease:
        lease = None
        if self._ending is None:
            lease = self._lease
        given = lease_id.encode()
        if lease is None or not secrets.compare_digest(lease.lease_id.encode(), given):
            raise invalid("lease_id", "is not that of the lease that holds this machine")
        return lease

    @reports_errors
    async def FindFreePort(
        self, request: agent_pb2.FindFreePortRequest, context: _Context
    ) -> agent_pb2.FindFreePortResponse:
        """Answer with a port that no process listens on at the address now.

        Raises OutriderError(INVALID_VALUE) for a lease that is not the machine's.
        """
        self._held(request.lease_id)
        try:
            return agent_pb2.FindFreePortResponse(port=free_port(request.address))
        except OSError as cause:
            message = f"has no free port: {cause.strerror}"
            raise invalid("address", message) from cause

    @reports_errors
    async def StartProcess(
        self, request: agent_pb2.StartProcessRequest, context: _Context
    ) -> agent_pb2.StartProcessResponse:
        """Start a process of the lease and answer with its id.

        Raises OutriderError(INVALID_VALUE) for a lease that is not the machine's, or for a command
        that an agent does not run.
        """
        lease = self._held(request.lease_id)
        launch = Launch(
            request.name,
            request.module,
            tuple(request.arguments),
            program=request.program,
            environment=dict(request.environment),
            cores=request.cores if request.HasField("cores") else None,
            files=dict(request.files),
        )
        check_launch(launch)
        return agent_pb2.StartProcessResponse(process_id=await lease.start(launch))

    @reports_errors
    async def SignalProcess(
        self, request: agent_pb2.SignalProcessRequest, context: _Context
    ) -> agent_pb2.SignalProcessResponse:
        """Stop, kill, pause or resume a process; stop and kill answer when it has ended.

        Raises OutriderError(INVALID_VALUE) for an unknown lease, process or signal.
        """
        handle = self._held(request.lease_id).process(request.process_id)
        actions = {
            agent_pb2.PROCESS_SIGNAL_STOP: handle.stop,
            agent_pb2.PROCESS_SIGNAL_KILL: handle.kill,
            agent_pb2.PROCESS_SIGNAL_PAUSE: handle.pause,
            agent_pb2.PROCESS_SIGNAL_RESUME: handle.resume,
        }
        action = actions.get(request.signal)
        if action is None:
            raise invalid("signal", f"must be STOP, KILL, PAUSE or RESUME, not {request.signal}")
        await action()
        return agent_pb2.SignalProcessResponse()

    @reports_errors
    async def GetProcess(
        self, request: agent_pb2.GetProcessRequest, context: _Context
    ) -> agent_pb2.GetProcessResponse:
        """Answer whether a process runs, its CPU time, and the last lines that it printed.

        Raises OutriderError(INVALID_VALUE) for an unknown lease or process.
        """
        handle = self._held(request.lease_id).process(request.process_id)
        cpu_duration = Duration()
        cpu_duration.FromNanoseconds(round(await handle.cpu_s() * 1e9))
        return agent_pb2.GetProcessResponse(
            is_alive=await handle.alive(), cpu_duration=cpu_duration, tail=await handle.tail()
        )


def peer_address(peer: str) -> str:
    """The IP address in gRPC's name of a peer, such as `ipv6:%5B::1%5D:5000`."""
    _, _, rest = unquote(peer).partition(":")
    address = rest.rpartition(":")[0].strip("[]")
    return str(ipaddress.ip_address(address))
