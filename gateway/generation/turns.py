"""Tenants' turns for the work that a request costs before it is sent to a verifier.

To parse, check and tokenise a request takes milliseconds of the event loop. In a burst, requests
that are refused must not wait for that work on accepted requests, and a tenant's requests must not
wait for another tenant's. Answers under way must not wait for it either: each of their tokens
passes through the loop several times.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

AT_ONCE = 8
"""Requests whose work is under way at once: some wait for another thread, or for Redis."""
OF_A_TENANT = 2
"""Requests of a single tenant among them. Each adds its work to a round of the event loop."""


class Turns:
    """Lets `at_once` requests do their work at once, of each tenant `of_a_tenant` at most.

    Tenants come in turn (round-robin).
    """

    def __init__(self, at_once: int, of_a_tenant: int) -> None:
        self._free = at_once
        self._of_a_tenant = of_a_tenant
        self._under_way: Counter[str] = Counter()
        # By tenant; the tenant whose turn was longest ago is first.
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    async def enter(self, tenant: str) -> None:
        """Wait for a turn. Each turn needs a `leave`."""
        if self._has_room(tenant):
            self._begin(tenant)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            # The turn may have come in the same moment.
            if not turn.cancelled():
                self.leave(tenant)
            raise

    @asynccontextmanager
    async def taken(self, tenant: str) -> AsyncIterator[None]:
        """Wait for a turn; it ends with the block."""
        await self.enter(tenant)
        try:
            yield
        finally:
            self.leave(tenant)

    def leave(self, tenant: str) -> None:
        """End a turn of the tenant, and give it to the next request that may have it."""
        self._free += 1
        self._under_way[tenant] -= 1
        if not self._under_way[tenant]:
            del self._under_way[tenant]
        while (waiting := next(filter(self._has_room, self._waiting), None)) is not None:
            if self._pass_to(waiting):
                return

    def _has_room(self, tenant: str) -> bool:
        return self._free > 0 and self._under_way[tenant] < self._of_a_tenant

    def _begin(self, tenant: str) -> None:
        self._free -= 1
        self._under_way[tenant] += 1

    def _pass_to(self, tenant: str) -> bool:
        """Give the tenant's next request a turn; False if all its requests have gone away."""
        queue = self._waiting.pop(tenant)
        while queue:
            turn = queue.popleft()
            if not turn.done():
                if queue:
                    self._waiting[tenant] = queue
                self._begin(tenant)
                turn.set_result(None)
                return True
        return False
