"""Runs functions in processes that can be killed, because threads cannot be killed.

Work that users or a model's files can make expensive (compiling grammars, masks, chat templates)
runs here: within limits of processor time and memory, and at a lower priority. All workers of a
kind are forked from one process that has loaded the code that they need. The workers end with the
process that uses them, however that process ends. Requests and answers are bytes; nothing is
unpickled.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from multiprocessing.connection import Connection

from outrider.process.workers import worker as wire

# Loading a tokenizer takes seconds, and longer on a busy machine.
_LOAD_S = 120.0
_MAX_ANSWER_BYTES = 64 * 2**20
# Signals that come from outside. A request can make a worker crash by other signals.
_KILLED = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
# By the wall clock, a request may take this many times its limit of processor time, because other
# processes may have the cores.
_WALL = 5


class WorkerError(Exception):
    """A worker could not answer; the message says why."""


class OutOfTime(WorkerError):
    """The worker was killed, because it took longer than its limit."""


class OutOfMemory(WorkerError):
    """The worker needed more memory than its limit, or crashed."""


class WorkerLost(WorkerError):
    """Another process killed the worker, or none could be started; the request is not at fault."""


class WorkerSource:
    """Forks workers from one process, which starts with this object. Thread-safe.

    `handler` is "module:function"; the function is called once with `arguments` (as in JSON) and
    returns a function from request to answer. A worker may allocate `memory_bytes` besides what
    has been loaded, and runs at the priority `nice`.
    """

    def __init__(
        self,
        handler: str,
        arguments: dict[str, object],
        *,
        memory_bytes: int = 2**30,
        nice: int = 0,
    ) -> None:
        self._program = json.dumps(
            [handler, arguments, {"memory_bytes": memory_bytes, "nice": nice}]
        )
        self.memory_bytes = memory_bytes
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._end: weakref.finalize | None = None  # type: ignore[type-arg]  # generic in stubs only
        self._loaded = False
        self._closed = False
        self._start()

    def _start(self) -> socket.socket:
        """Start the process from which workers are forked; do not wait until it has loaded."""
        own, other = socket.socketpair()
        self._control = own
        self._loaded = False
        own.settimeout(_LOAD_S)
        # The new process gets our import path; -P keeps the working directory out of it.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-P", "-m", wire.__name__, str(other.fileno()), self._program]
        process = subprocess.Popen(
            command, pass_fds=[other.fileno()], stdin=subprocess.DEVNULL, env=environment
        )
        other.close()
        # The process also ends when this object is forgotten, and when the interpreter ends.
        self._end = weakref.finalize(self, _end, own, process)
        return own

    def fork(self) -> tuple[int, Connection]:
        """Fork a worker; return its id and the connection to it.

        Waits until the process has loaded. Starts the process again if it has ended. Raises
        WorkerLost if that fails too.
        """
        with self._lock:
            try:
                return self._fork()
            except OSError:
                self._stop()
            try:
                return self._fork()
            except OSError as cause:
                self._stop()
                raise WorkerLost(f"has no process to run in: {cause}") from cause

    def _fork(self) -> tuple[int, Connection]:
        if self._closed:
            raise WorkerLost("has no process to run in: its workers have been closed")
        control = self._control or self._start()
        if not self._loaded:
            _receive(control, 1)
            self._loaded = True
        own, other = socket.socketpair()
        with other:
            socket.send_fds(control, [wire.FORK], [other.fileno()])
        pid = int.from_bytes(_receive(control, wire.PID_BYTES), "big")
        return pid, Connection(own.detach())

    def kill(self, pid: int) -> int:
        """Kill a worker and wait for its end.

        Returns the signal that ended the worker: SIGKILL, an earlier signal, or 0 if the worker
        exited without a signal.
        """
        with self._lock:
            if self._control is None:
                return signal.SIGKILL  # the workers ended with the process
            try:
                self._control.sendall(wire.KILL + pid.to_bytes(wire.PID_BYTES, "big"))
                return _receive(self._control, 1)[0]
            except OSError:
                self._stop()
                return signal.SIGKILL

    def close(self) -> None:
        """End the process and all its workers."""
        with self._lock:
            self._closed = True
            self._stop()

    def _stop(self) -> None:
        self._control = None
        if self._end is not None:
            self._end()


def _end(control: socket.socket, process: subprocess.Popen[bytes]) -> None:
    control.close()
    process.kill()
    process.wait()


class Worker:
    """One process of a source, forked at its first use and after each kill. One thread uses it."""

    def __init__(self, source: WorkerSource) -> None:
        self._source = source
        self._forked: tuple[int, Connection] | None = None

    def start(self) -> None:
        """Fork the process now, so that the first call need not wait."""
        if self._forked is None:
            self._forked = self._source.fork()

    def call(self, request: bytes, seconds: float) -> bytes:
        """Send the request; return the answer, which may take `seconds` of processor time.

        A worker that another process killed, perhaps before this call, is replaced once. Raises
        OutOfTime, also if no answer comes within five times as long by the wall clock; OutOfMemory;
        WorkerLost if the second worker was killed too, or if no worker could be started; or
        WorkerError. After a kill, the next call has a new process.
        """
        try:
            return self._call(request, seconds)
        except WorkerLost:
            return self._call(request, seconds)

    def _call(self, request: bytes, seconds: float) -> bytes:
        self.start()
        assert self._forked is not None
        connection = self._forked[1]
        slow = f"took longer than {seconds:g} s"
        try:
            connection.send_bytes(wire.SECONDS.pack(seconds) + request)
            if not connection.poll(_WALL * seconds):
                self.kill()
                raise OutOfTime(slow)
            answer = connection.recv_bytes(_MAX_ANSWER_BYTES)
        except (OSError, EOFError) as cause:
            ended_by = self.kill()
            if ended_by == wire.OUT_OF_TIME:
                raise OutOfTime(slow) from cause
            if ended_by in _KILLED:
                raise WorkerLost("lost its process, which was killed") from cause
            # Many libraries end the process when they cannot allocate memory.
            raise OutOfMemory(self._memory()) from cause
        if answer[:1] == wire.RESULT:
            return answer[1:]
        # A failed request may leave much memory in use.
        self.kill()
        if answer[:1] == wire.NO_MEMORY:
            raise OutOfMemory(self._memory())
        raise WorkerError(answer[1:].decode(errors="replace"))

    def kill(self) -> int:
        """End the process; the next call forks a new process. Returns the signal that ended it."""
        if self._forked is None:
            return 0
        pid, connection = self._forked
        self._forked = None
        connection.close()
        return self._source.kill(pid)

    def _memory(self) -> str:
        return f"needed more than {self._source.memory_bytes // 2**20} MiB of memory, or crashed"


def _receive(control: socket.socket, count: int) -> bytes:
    """Receive `count` bytes; raise OSError if the other end has closed."""
    found = b""
    while len(found) < count:
        part = control.recv(count - len(found))
        if not part:
            raise ConnectionResetError("the process that forks workers has ended")
        found += part
    return found
