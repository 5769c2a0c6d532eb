"""Cancelled at any point, a lookup never leaves its reply to another caller (redis-py once did, its issues 2624 and 2665)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import uvloop
from delaying_proxy import delaying_proxy
from pools import TENANT, pool, until, written
from redis_servers import Standalone

from drafter_svc.pools.redis import Query, RedisPool

_KEYS = 500
_CALLERS = 40
Lookup = Callable[[int], Awaitable[int | None]]


@dataclass
class Tally:
    """Calls that were cancelled while they waited, and replies that were the asked key's or another's."""

    cancelled: int = 0
    right: int = 0
    wrong: int = 0


async def disturb(lookup: Lookup, cancellations: int, tally: Tally) -> None:
    """Look up key after key, as many callers at once, and cancel most of them somewhere on the way."""
    rng = random.Random(1)

    async def call() -> None:
        while tally.cancelled < cancellations:
            wanted = rng.randrange(_KEYS)
            task = asyncio.ensure_future(lookup(wanted))
            # At least one step, so that the lookup has begun; seven of eight are cancelled after a few more, or after some time.
            for _ in range(rng.randrange(1, 9)):
                await asyncio.sleep(0)
            if rng.random() < 0.5:
                await asyncio.sleep(rng.random() * 0.005)
            if rng.random() < 0.875:
                task.cancel()
            [answer] = await asyncio.gather(task, return_exceptions=True)
            if isinstance(answer, asyncio.CancelledError):
                tally.cancelled += 1
            elif answer is not None:
                tally.right += answer == wanted
                tally.wrong += answer != wanted

    await asyncio.gather(*(call() for _ in range(_CALLERS)))


def through_pool(made: RedisPool) -> Lookup:
    """Each n-gram's continuation tells which n-gram it follows."""
    tenant = made.tenant(TENANT)

    async def lookup(wanted: int) -> int | None:
        running = made.counters.skipped
        [found] = await made.lookup([Query(tenant, [[7, wanted], [wanted]])])
        if made.counters.skipped > running:
            await asyncio.sleep(0.001)
        return found[0] if found else None

    return lookup


@asynccontextmanager
async def pool_behind_proxy(server: Standalone) -> AsyncIterator[RedisPool]:
    async with delaying_proxy(server.data[0].port) as port, pool(server.server) as direct:
        await written(direct, *(([i], [i]) for i in range(_KEYS)))
        async with pool(
            replace(server.server, addresses=(("127.0.0.1", port),)), budget_s=0.004
        ) as made:
            yield made
            await until(lambda: not made._running)


@pytest.mark.parametrize("cancellations", [2_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_no_cancelled_lookup_hands_its_reply_to_another_caller(
    redis_server: Standalone, cancellations: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[Exception] = []
    count_failure = RedisPool._failed

    def failed(made: RedisPool, standing: Any, error: Exception) -> None:
        errors.append(error)
        count_failure(made, standing, error)

    monkeypatch.setattr(RedisPool, "_failed", failed)

    async def run() -> None:
        async with pool_behind_proxy(redis_server) as made:
            tally = Tally()
            await disturb(through_pool(made), cancellations, tally)
            assert tally.cancelled >= cancellations
            assert tally.wrong == 0
            assert tally.right > cancellations / 50
            assert made.counters.late > cancellations / 100
            assert made.counters.lookups >= cancellations
            assert made.counters.malformed == 0
            # A machine that is busy with other work may keep a reply back for longer than a socket's time-out.
            assert [error for error in errors if not isinstance(error, TimeoutError)] == []
            assert made.counters.failed == len(errors) <= cancellations / 1000

    uvloop.run(run())


class _NaiveClient:
    """Keeps connections, and keeps one as well whose reply was not awaited."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def lookup(self, wanted: int) -> int | None:
        reader, writer = (
            self._idle.pop()
            if self._idle
            else await asyncio.open_connection("127.0.0.1", self._port)
        )
        try:
            writer.write(b"ECHO %d\r\n" % wanted)
            await reader.readline()
            return int(await reader.readline())
        finally:
            self._idle.append((reader, writer))

    async def aclose(self) -> None:
        for _, writer in self._idle:
            writer.close()
            await asyncio.gather(writer.wait_closed(), return_exceptions=True)


def test_the_check_detects_a_client_that_mixes_up_replies(
    redis_server: Standalone,
) -> None:
    async def run() -> None:
        async with delaying_proxy(redis_server.data[0].port) as port:
            client, tally = _NaiveClient(port), Tally()
            await disturb(client.lookup, 500, tally)
            await client.aclose()
            assert tally.wrong > 0

    uvloop.run(run())
