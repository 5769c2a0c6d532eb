"""Handlers that tests run in worker processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable


def make(prefix: str) -> Callable[[bytes], bytes]:
    """Return a handler of commands that tests send."""
    held: list[bytearray] = []

    def handle(request: bytes) -> bytes:
        command, _, argument = request.decode().partition(" ")
        match command:
            case "say":
                return f"{prefix}{argument}".encode()
            case "pid":
                return f"{os.getpid()} {os.getppid()}".encode()
            case "hang":
                # One call that no signal handler and no thread can interrupt.
                pow(3, 10**10)
            case "take":
                held.append(bytearray(int(argument)))
            case "sleep":
                time.sleep(float(argument))
            case "fail":
                raise ValueError(argument)
            case "end":
                name, _, path = argument.partition(" ")
                with open(path, "a", encoding="ascii") as file:
                    file.write("x")
                os.kill(os.getpid(), signal.Signals[name])
                # Another thread may get the signal, and a core dump takes a moment.
                signal.pause()
        return b""

    return handle
