"""The process that workers are forked from, and the workers: see `outrider.process.workers.pool`.

This process loads once what all workers need, so that a worker that was killed is replaced in
milliseconds. The process runs one thread, and reads commands from its socket until the other end
closes.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import resource
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from outrider.process.runtime import exit_now

Handler = Callable[[bytes], bytes]
FORK = b"F"
KILL = b"K"
READY = b"R"
PID_BYTES = 8
# A request begins with the processor time that it may take, in seconds.
SECONDS = struct.Struct("d")
# This signal ends a worker that has taken its processor time.
OUT_OF_TIME = signal.SIGPROF
# The first byte of an answer: a result, no memory left, or an exception's text.
RESULT = b"\0"
NO_MEMORY = b"\1"
FAILED = b"\2"
_KILL_WITH_PARENT = 1  # PR_SET_PDEATHSIG
# LLGuidance recurses along rules and references, and a stack overflow ends the process. The longest
# chains that 65,536 characters allow overflow 32 MiB and fit in 128 MiB. Untouched stack costs no
# memory.
STACK_BYTES = 256 * 2**20


def main() -> None:
    """Load the handler that the arguments name, then fork and kill workers as commands say."""
    control = socket.socket(fileno=int(sys.argv[1]))
    name, arguments, limits = json.loads(sys.argv[2])
    # Ctrl-C reaches the whole group, but the parent decides when its workers end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    module, _, function = name.partition(":")
    handler = getattr(importlib.import_module(module), function)(**arguments)
    try:
        control.sendall(READY)
    except BrokenPipeError:
        return  # the parent has ended meanwhile
    while True:
        command, descriptors, _, _ = socket.recv_fds(control, 1 + PID_BYTES, 1)
        if not command:
            return
        if command[:1] == FORK:
            pid = _fork(control, descriptors[0], handler, limits)
            control.sendall(pid.to_bytes(PID_BYTES, "big"))
        else:
            pid = int.from_bytes(command[1:], "big")
            # A child that was not waited for keeps its id, so no other process is hit.
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            # The signal is not SIGKILL if the worker had exited before it was killed.
            control.sendall(bytes([os.WTERMSIG(status)]))


def _fork(control: socket.socket, descriptor: int, handler: Handler, limits: dict[str, Any]) -> int:
    """Fork a worker that answers on the socket `descriptor`; return its id."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        os.close(descriptor)
        return pid
    try:
        control.close()
        _bind_to(parent)
        _limit(**limits)
        threading.stack_size(STACK_BYTES)
        serving = threading.Thread(target=_serve, args=(Connection(descriptor), handler))
        serving.start()
        serving.join()
    finally:
        exit_now()


def _bind_to(parent: int) -> None:
    """Have this process end when the parent ends, however the parent ends.

    Systems other than Linux have no such call.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_KILL_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        exit_now()


def _limit(memory_bytes: int, nice: int) -> None:
    """Limit the memory that the worker may add from now on, and lower its priority."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(OUT_OF_TIME, signal.SIG_DFL)
    if sys.platform == "linux":
        with open("/proc/self/statm", encoding="ascii") as file:
            pages = int(file.read().split()[0])
        most = pages * resource.getpagesize() + STACK_BYTES + memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    os.nice(nice)


def _serve(connection: Connection, handler: Handler) -> None:
    """Answer requests until the other end closes."""
    while True:
        try:
            request = connection.recv_bytes()
        except EOFError:
            return
        # The timer counts processor time: on a busy machine a worker may wait long for its turn.
        signal.setitimer(signal.ITIMER_PROF, *SECONDS.unpack_from(request))
        answer = _answer(handler, request[SECONDS.size :])
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.send_bytes(answer)


def _answer(handler: Handler, request: bytes) -> bytes:
    try:
        return RESULT + handler(request)
    except MemoryError:
        return NO_MEMORY
    # The parent raises an error with this text.
    except Exception as error:  # noqa: BLE001
        return FAILED + f"{type(error).__name__}: {error}"[:1000].encode(errors="replace")


if __name__ == "__main__":
    main()
