"""Runs the stack's processes on this host: starts and stops them, and restarts processes that die.

The supervisor passes on the lines that the processes print. It handles command lines and exit
statuses, and no models, tokens or protocols.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

_BACKOFF_S = (0.5, 10.0)
_STABLE_S = 30.0
_STOP_S = 12.0
_CLEAN_UP_S = 1.0


@dataclass(eq=False)
class Child:
    """One process: the module that it runs, and its command line."""

    name: str
    module: str
    arguments: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    process: asyncio.subprocess.Process | None = None
    restarts: int = 0

    @property
    def pid(self) -> int | None:
        """The process id of the last run; None before the first run."""
        return self.process.pid if self.process is not None else None


class StartFailed(Exception):
    """A child ended with an error before the stack was up; another attempt would fail too."""


class Supervisor:
    """Keeps children running from `start` to `stop`."""

    def __init__(self, show: Callable[[str, str], None]) -> None:
        """The supervisor calls `show` with a child's name and each line that the child prints."""
        self.children: list[Child] = []
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Holds the exception of the first task that failed; the caller must then `stop`."""
        self._show = show
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = asyncio.Event()
        self._settled = False

    def start(self, child: Child) -> None:
        """Start a child, and restart it with growing delays whenever it dies."""
        self.children.append(child)
        self.watch(self._keep_running(child))

    def watch(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a task until `stop`; `failed` gets its exception."""
        task = asyncio.create_task(work)
        self._tasks.append(task)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not self.failed.done():
            self.failed.set_exception(error)

    async def settle(self, ready: Awaitable[None]) -> None:
        """Wait until `ready` is done; from then on, a child that ends is always restarted.

        Raises StartFailed if a child fails earlier.
        """
        waiting = asyncio.ensure_future(ready)
        try:
            await asyncio.wait((waiting, self.failed), return_when=asyncio.FIRST_COMPLETED)
            if self.failed.done():
                self.failed.result()
            waiting.result()
            self._settled = True
        finally:
            waiting.cancel()

    async def stop(self) -> None:
        """Send SIGTERM to all children, gateway and drafters first, then SIGKILL if they remain.

        SIGKILL follows after 12 s, or at once if this call is cancelled.
        """
        self._stopping.set()
        for child in reversed(self.children):
            _signal(child, signal.SIGTERM)
        pending = [child.process.wait() for child in self.children if child.process is not None]
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_STOP_S):
                    await asyncio.gather(*pending)
        finally:
            for child in self.children:
                _signal(child, signal.SIGKILL)
            await self._clean_up()

    async def _clean_up(self) -> None:
        """Let the tasks reap their children and close their pipes, then end the tasks."""
        try:
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=_CLEAN_UP_S)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            # A task that failed leaves output unread, which keeps its child's pipe open. The event
            # loop must not close before the pipe does.
            drains = [asyncio.create_task(_drain(child)) for child in self.children]
            if drains:
                await asyncio.wait(drains, timeout=_CLEAN_UP_S)

    async def _keep_running(self, child: Child) -> None:
        backoff_s = _BACKOFF_S[0]
        while not self._stopping.is_set():
            started = time.monotonic()
            ended, is_error = await self._run(child)
            if self._stopping.is_set():
                return
            if is_error and not self._settled:
                raise StartFailed(f"{child.name} could not start: it {ended}")
            if time.monotonic() - started > _STABLE_S:
                backoff_s = _BACKOFF_S[0]
            self._show("outrider", f"{child.name} {ended}; restarting it in {backoff_s:.1f} s")
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _BACKOFF_S[1])
            child.restarts += 1

    async def _run(self, child: Child) -> tuple[str, bool]:
        """Run a child once, to its end.

        Returns how the child ended, and whether that was its own error, not a signal.
        """
        try:
            child.process = await _spawn(child)
        except OSError as error:
            # The machine may be out of memory or of processes just now.
            return f"could not be run: {error}", True
        if self._stopping.is_set():
            # When `stop` sent its signals, this child did not run yet.
            _signal(child, signal.SIGKILL)
        output = child.process.stdout
        while output is not None and (line := await _line(output)):
            self._show(child.name, line.decode(errors="replace").rstrip())
        status = await child.process.wait()
        return f"ended with status {status}", status > 0


async def _spawn(child: Child) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *not_orphaned(),
        sys.executable,
        "-m",
        child.module,
        *child.arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, **child.environment},
        # A separate group: Ctrl-C in a terminal reaches only the supervisor, which then stops all
        # children in order.
        start_new_session=True,
    )


@functools.cache
def not_orphaned() -> list[str]:
    """Return a prefix for a command, so that the child gets SIGTERM when its starter has ended.

    With the prefix, children end even if the supervisor is killed: Linux sends SIGTERM when the
    thread that started them has ended. The prefix is empty if `setpriv` cannot do that.
    """
    command = ["setpriv", "--pdeathsig", "TERM"]
    try:
        # Older versions of setpriv lack the option.
        tried = subprocess.run([*command, "true"], stderr=subprocess.DEVNULL, check=False)
    except OSError:
        return []
    return command if tried.returncode == 0 else []


async def _drain(child: Child) -> None:
    """Read and drop the child's output until its end."""
    output = child.process.stdout if child.process is not None else None
    while output is not None and await output.read(1 << 16):
        pass


async def _line(output: asyncio.StreamReader) -> bytes:
    """Return the next line, or if it is longer than the reader's buffer, a piece of it."""
    try:
        return await output.readuntil()
    except asyncio.IncompleteReadError as end:
        return end.partial
    except asyncio.LimitOverrunError as error:
        return await output.readexactly(error.consumed)


def _signal(child: Child, number: signal.Signals) -> None:
    """Send a signal to the child, which ends its own processes; SIGKILL goes to the whole group."""
    if child.process is None:
        return
    with contextlib.suppress(ProcessLookupError):
        if number is signal.SIGKILL:
            os.killpg(child.process.pid, number)
        elif child.process.returncode is None:
            os.kill(child.process.pid, number)
