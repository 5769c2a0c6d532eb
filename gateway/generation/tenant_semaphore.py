"""A semaphore, fair to tenants, for the work on a request before it is sent to a verifier.

To parse, check and tokenise a request takes milliseconds of the event loop. In a burst, this work
on accepted requests must not delay the refusal of other requests, and one tenant's work must not
delay another tenant's requests. Nor may the work delay answers in progress: each of their tokens
passes through the loop several times.

uvloop accepts one connection in each round of the event loop, in order of arrival. So after a
tenant's burst, another tenant's connection would wait for the work on the whole burst. Slots are
therefore given in a round in which no request has come in.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

AT_ONCE = 8
"""The maximum number of requests whose work is under way. More than one request can make progress,
since some wait for another thread or process.
"""
OF_A_TENANT = 2
"""The maximum number of these requests of a single tenant.

Each of them adds its work to a round of the event loop.
"""
# While requests come in round after round, slots are held back, but for no longer than `_HOLD_S`:
# enough time to accept some thousand connections. After that time slots are given for `_GIVE_S`
# even while requests come in, since they may never stop coming in. Both limits are seconds of
# processor time, because a busy machine takes longer to accept requests.
_HOLD_S = 0.4
_GIVE_S = 0.1


class TenantSemaphore:
    """Lets `at_once` requests work at the same time, at most `of_a_tenant` of each tenant.

    Tenants get slots in turn (round-robin), when no more requests come in.
    """

    def __init__(self, at_once: int, of_a_tenant: int) -> None:
        self._free = at_once
        self._of_a_tenant = of_a_tenant
        self._under_way: Counter[str] = Counter()
        # Keyed by tenant, in the order of the tenants' turns.
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        # `_has_come` says that a request has arrived since the last check, and `_looks` that
        # another check is scheduled.
        self._has_come = False
        self._looks = False
        # The latest time until which slots are held back, and the time until which they are given
        # even while requests come in (both in the thread's processor time).
        self._held_until = 0.0
        self._given_until = 0.0

    def comes_in(self) -> None:
        """Hold slots back for a round, since another request may come in after this one."""
        loop = asyncio.get_running_loop()
        self._has_come = True
        now = time.thread_time()
        if not self._looks and now >= self._given_until:
            self._looks = True
            self._held_until = now + _HOLD_S
            loop.call_soon(self._look)

    def _look(self) -> None:
        """Give slots if no request has come in since the last check, or after `_HOLD_S`.

        Otherwise check again in the next round of the event loop.
        """
        loop = asyncio.get_running_loop()
        now = time.thread_time()
        if self._has_come and now < self._held_until:
            self._has_come = False
            loop.call_soon(self._look)
            return
        if self._has_come:
            self._given_until = now + _GIVE_S
        self._looks = False
        self._give()

    async def acquire(self, tenant: str) -> None:
        """Wait for a slot. Each slot needs a `release`."""
        self.comes_in()
        slot: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(slot)
        if not self._looks:
            self._give()
        try:
            await slot
        except asyncio.CancelledError:
            # The slot may have been given at the same moment.
            if not slot.cancelled():
                self.release(tenant)
            raise

    @asynccontextmanager
    async def held(self, tenant: str) -> AsyncIterator[None]:
        """Wait for a slot; the end of the block releases it."""
        await self.acquire(tenant)
        try:
            yield
        finally:
            self.release(tenant)

    def release(self, tenant: str) -> None:
        """Release a slot of the tenant.

        Unless slots are held back, give it to the next request that may have it.
        """
        self._free += 1
        self._under_way[tenant] -= 1
        if not self._under_way[tenant]:
            del self._under_way[tenant]
        if not self._looks:
            self._give()

    def _give(self) -> None:
        """Give the free slots to requests that may have them."""
        while (waiting := next(filter(self._has_room, self._waiting), None)) is not None:
            self._pass_to(waiting)

    def _has_room(self, tenant: str) -> bool:
        return self._free > 0 and self._under_way[tenant] < self._of_a_tenant

    def _pass_to(self, tenant: str) -> None:
        """Give a slot to the tenant's next request that has not gone away, if there is any."""
        queue = self._waiting.pop(tenant)
        while queue:
            slot = queue.popleft()
            if not slot.done():
                if queue:
                    self._waiting[tenant] = queue
                self._free -= 1
                self._under_way[tenant] += 1
                slot.set_result(None)
                return
