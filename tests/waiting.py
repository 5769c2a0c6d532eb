"""Waits for conditions that have no event."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable


async def until(
    condition: Callable[[], object | Awaitable[object]], timeout_s: float = 30.0
) -> None:
    """Wait until `condition()`, awaited if it is awaitable, is true.

    Raises TimeoutError if this takes longer than `timeout_s`.
    """

    async def holds() -> bool:
        met = condition()
        return bool(await met if inspect.isawaitable(met) else met)

    async with asyncio.timeout(timeout_s):
        while not await holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def wait_until(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Wait as `until` does, where no event loop runs; `condition()` must not be awaitable."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.02)
