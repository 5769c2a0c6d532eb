"""The far end of an ssh connection: runs one process of an experiment on its machine.

`python -m outrider_bench.experiment.remote_worker run` reads a launch as a line of JSON. The
process prints where this one does. Further lines have the names of signals to send to it, or `CPU`,
which is answered on standard error. When the input ends, or is silent for 20 s, the process is
ended. `describe` prints what the near end, `remote`, must know of the machine.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from signal import Signals

from outrider_bench.experiment.hosts import LOOPBACK, Launch, LocalHandle, LocalHost

SILENCE_S = 20.0
"""The near end sends a line more often than this while it lives."""
CPU = "CPU"
"""Asks for the CPU time of the process, in seconds."""
_ROOT = Path(__file__).parents[2]


def describe() -> None:
    """Print this machine, its commit, and the addresses of both ends of the connection."""
    from outrider_bench.experiment.machine import commit, this_machine

    # As sshd gives it (sshd(8)): the near end's address and port, then this machine's.
    words = os.environ.get("SSH_CONNECTION", "").split()
    near, _, here, _ = words if len(words) == 4 else [LOOPBACK] * 4
    described = {"machine": asdict(this_machine()), "commit": commit(_ROOT)}
    print(json.dumps({**described, "address": here, "controller_address": near}))


async def run() -> int:
    """Run the process of the input's first line to its end; returns its exit status."""
    reader = asyncio.StreamReader(limit=2**24)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    launch = Launch(**json.loads(await reader.readline()))
    try:
        handle = await LocalHost().start(launch, output=None)
    except OSError as error:
        print(f"{launch.name} could not be started: {error}", flush=True)
        return 1
    obeying = asyncio.create_task(_obey(reader, handle))
    await asyncio.wait({obeying, handle.ended}, return_when=asyncio.FIRST_COMPLETED)
    await handle.stop()
    status = await handle.ended
    return 128 - status if status < 0 else status


async def _obey(reader: asyncio.StreamReader, handle: LocalHandle) -> None:
    """Do what the input says, until it ends or is silent."""
    while word := (await _next_line(reader)).decode():
        if word.strip() == CPU:
            print(CPU, await handle.cpu_s(), file=sys.stderr, flush=True)
        elif word.strip():
            handle.send_signal(Signals[word.strip()])


async def _next_line(reader: asyncio.StreamReader) -> bytes:
    try:
        async with asyncio.timeout(SILENCE_S):
            return await reader.readline()
    except TimeoutError:
        return b""


if __name__ == "__main__":
    # Models are named by their paths in the checkout.
    os.chdir(_ROOT)
    if sys.argv[1] == "describe":
        describe()
    else:
        sys.exit(asyncio.run(run()))
