"""Runs the stack's processes on this host: starts them, passes on what they print, restarts what dies, stops everything.

Knows command lines and exit statuses; not models, tokens or protocols.
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
_SEE_OFF_S = 1.0


@dataclass(eq=False)
class Child:
    """One process, by the module it runs."""

    name: str
    module: str
    arguments: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    process: asyncio.subprocess.Process | None = None
    restarts: int = 0

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process is not None else None


class StartFailed(Exception):
    """A child ended with an error before the whole stack was up: trying again would end the same way."""


class Supervisor:
    """Keeps children running from `start` to `stop`. `tell` hears each line they print, with the child's name."""

    def __init__(self, tell: Callable[[str, str], None]) -> None:
        self.children: list[Child] = []
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Has an exception once a task that supervises has ended with one; then nothing is left but to `stop`."""
        self._tell = tell
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = asyncio.Event()
        self._settled = False

    def start(self, child: Child) -> None:
        """Start a child and restart it, with growing delays, whenever it dies."""
        self.children.append(child)
        self.watch(self._keep_running(child))

    def watch(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a task until `stop`; if it ends with an exception, so does `failed`."""
        task = asyncio.create_task(work)
        self._tasks.append(task)
        task.add_done_callback(self._look)
        return task

    def _look(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not self.failed.done():
            self.failed.set_exception(error)

    async def settle(self, ready: Awaitable[None]) -> None:
        """Wait until `ready`; from then on a child is restarted whatever ended it. Raises StartFailed when one fails
        before.
        """
        waiting = asyncio.ensure_future(ready)
        try:
            await asyncio.wait((waiting, self.failed), return_when=asyncio.FIRST_COMPLETED)
            (self.failed if self.failed.done() else waiting).result()
            self._settled = True
        finally:
            waiting.cancel()

    async def stop(self) -> None:
        """SIGTERM to all, drafters and gateway first, and SIGKILL to whoever is still there after a while or an interrupt."""
        self._stopping.set()
        for child in reversed(self.children):
            _signal(child, signal.SIGTERM)
        pending = [child.process.wait() for child in self.children if child.process is not None]
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.gather(*pending), _STOP_S)
        finally:
            for child in self.children:
                _signal(child, signal.SIGKILL)
            await self._see_off()

    async def _see_off(self) -> None:
        """Let the tasks see their children end, so that nothing of these is left open; then end the tasks as well."""
        try:
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=_SEE_OFF_S)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            # What a task that failed left unread keeps its child's pipe open, and the event loop must not end before that.
            unread = [asyncio.create_task(_drain(child)) for child in self.children]
            if unread:
                await asyncio.wait(unread, timeout=_SEE_OFF_S)

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
            self._tell("outrider", f"{child.name} {ended}; restarting it in {backoff_s:.1f} s")
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _BACKOFF_S[1])
            child.restarts += 1

    async def _run(self, child: Child) -> tuple[str, bool]:
        """Run once, to the end; how it ended, and whether that was an error of its own rather than a signal."""
        try:
            child.process = await _spawn(child)
        except OSError as error:
            # Such as a machine that has no memory or no process left just now.
            return f"could not be run: {error}", True
        output = child.process.stdout
        while output is not None and (line := await _line(output)):
            self._tell(child.name, line.decode(errors="replace").rstrip())
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
        # A group of its own: Ctrl-C in a terminal reaches the supervisor alone, which then stops everyone in order.
        start_new_session=True,
    )


@functools.cache
def not_orphaned() -> list[str]:
    """What has Linux end a program in good order when the thread that started it is gone, even killed; empty where nothing does."""
    command = ["setpriv", "--pdeathsig", "TERM"]
    try:
        # Not every setpriv knows of it.
        known = (
            subprocess.run([*command, "true"], stderr=subprocess.DEVNULL, check=False).returncode
            == 0
        )
    except OSError:
        known = False
    return command if known else []


async def _drain(child: Child) -> None:
    while (
        child.process is not None
        and child.process.stdout is not None
        and await child.process.stdout.read(1 << 16)
    ):
        pass


async def _line(output: asyncio.StreamReader) -> bytes:
    """The next line; of one that is longer than the reader's buffer, a piece."""
    try:
        return await output.readline()
    except ValueError:
        return await output.read(1024)


def _signal(child: Child, number: signal.Signals) -> None:
    """Signal the child and whatever it started."""
    if child.process is not None and child.process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.process.pid, number)
