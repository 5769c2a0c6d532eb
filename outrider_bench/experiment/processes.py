"""Starts named processes, watches them, and stops them, the last started first."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from outrider_bench.experiment.child import Child, Launch, start

_READY_S = 300.0
_LOOK_S = 0.1


class StackFailed(Exception):
    """A process could not start, has ended, or was not ready in time, or a campaign had to stop.

    If a process has ended, the message has its last lines. If a process was not ready in time, the
    message has the last lines of all processes.
    """


@dataclass(slots=True)
class _Process:
    launch: Launch
    child: Child
    is_wanted: bool = True


class Processes:
    """Running processes, keyed by name."""

    def __init__(self) -> None:
        self._all: dict[str, _Process] = {}

    async def start(self, launch: Launch) -> None:
        """Start a process; raise StackFailed when it cannot be run."""
        try:
            child = await start(launch)
        except OSError as error:
            raise StackFailed(f"{launch.name} could not be started: {error}") from error
        self._all[launch.name] = _Process(launch, child)

    def child(self, name: str) -> Child:
        """Return a process that was started."""
        return self._all[name].child

    async def end(self, name: str) -> None:
        """Stop a process; `check` then does not report it as missing."""
        process = self._all[name]
        process.is_wanted = False
        await process.child.stop()

    async def again(self, name: str) -> None:
        """Start a process again after `end`; do nothing if it was not ended."""
        process = self._all[name]
        if not process.is_wanted:
            await self.start(process.launch)

    async def cpu_s(self) -> dict[str, float]:
        """Return the CPU seconds of each process."""
        return {name: await process.child.cpu_s() for name, process in self._all.items()}

    async def check(self) -> None:
        """Raise StackFailed if a process that should run has ended.

        The message has the last lines of the process.
        """
        for name, process in self._all.items():
            if process.is_wanted and not await process.child.alive():
                raise StackFailed(f"{name} ended\n{await self._last_lines(name)}")

    async def until(self, who: str, is_ready: Callable[[], Awaitable[bool]]) -> None:
        """Wait until `is_ready` returns True.

        Raises StackFailed after 300 s, or when a process ends.
        """
        try:
            async with asyncio.timeout(_READY_S):
                while not await is_ready():
                    await self.check()
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError as error:
            tails = "\n".join([await self._last_lines(name) for name in self._all])
            raise StackFailed(f"{who} was not ready after {_READY_S:.0f} s\n{tails}") from error

    async def stop(self) -> None:
        """Stop all processes, the last started first, and forget them."""
        for name in reversed(list(self._all)):
            await self._all.pop(name).child.stop()

    async def _last_lines(self, name: str) -> str:
        return "\n".join(f"  {name}: {line}" for line in await self._all[name].child.tail())
