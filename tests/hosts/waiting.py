"""Waits until something holds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable


async def until(condition: Callable[[], Awaitable[bool]], timeout_s: float = 20.0) -> None:
    """Ask again and again; raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while not await condition():  # noqa: ASYNC110  # nothing tells
            await asyncio.sleep(0.01)
