"""Tenants' turns for the work that a request costs before it is sent to a verifier.

To parse, check and tokenise a request takes milliseconds of the event loop. In a burst, requests
that are refused must not wait for that work on the others, nor one tenant's for another's.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

AT_ONCE = 8
"""Requests whose work is under way at once: some wait for another thread, or for Redis."""


class Turns:
    """Lets `at_once` requests do their work at once; tenants come in turn (round-robin)."""

    def __init__(self, at_once: int) -> None:
        self._free = at_once
        # By tenant; the one whose turn was longest ago is first.
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    async def enter(self, tenant: str) -> None:
        """Wait for a turn."""
        if self._free > 0:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            # The turn may have come in the same moment.
            if not turn.cancelled():
                self.leave()
            raise

    @asynccontextmanager
    async def taken(self, tenant: str) -> AsyncIterator[None]:
        """Wait for a turn; it ends with the block."""
        await self.enter(tenant)
        try:
            yield
        finally:
            self.leave()

    def leave(self) -> None:
        """End a turn, and give it to the next request."""
        while self._waiting:
            tenant = next(iter(self._waiting))
            queue = self._waiting.pop(tenant)
            turn = queue.popleft()
            if queue:
                self._waiting[tenant] = queue
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
