"""A lookup that is cancelled at any point never leaves its reply to another caller.

In redis-py such replies once went to other callers (its issues 2624 and 2665).
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import pytest
import uvloop

from drafter_svc.pools import redis as redis_pool
from drafter_svc.pools.redis import Query, RedisPool
from outrider.process.network.ports import free_port
from outrider_bench.experiment.link_process import LinkControl
from outrider_bench.experiment.spec import Link
from tests.ngram.pools import TENANT, pool, written
from tests.redis_servers import Standalone
from tests.waiting import until

_KEYS = 500
_CALLERS = 40
_LINK = """
from outrider_bench.experiment import link_process, links
links.SEGMENT_BYTES = 7
link_process.main()
"""
Lookup = Callable[[int], Awaitable[int | None]]


@dataclass
class Tally:
    """Counts of cancelled calls, of replies for the right key, and of replies for another key."""

    cancelled: int = 0
    right: int = 0
    wrong: int = 0


async def disturb(lookup: Lookup, goes_on: Callable[[], bool], tally: Tally) -> None:
    """Look up keys with many callers at the same time, and cancel most lookups at random points."""
    rng = random.Random(1)

    async def call() -> None:
        while goes_on():
            wanted = rng.randrange(_KEYS)
            task = asyncio.ensure_future(lookup(wanted))
            # Let the lookup begin. Cancel seven of eight lookups after a few steps or a short time.
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
    """Return a function that looks up n-grams in a pool where a continuation names its n-gram."""
    tenant = made.tenant(TENANT)

    async def lookup(wanted: int) -> int | None:
        skipped = made.counters.skipped
        [found] = await made.lookup([Query(tenant, [[7, wanted], [wanted]])])
        if made.counters.skipped > skipped:
            await asyncio.sleep(0.001)
        return next(iter(found), None)

    return lookup


@asynccontextmanager
async def delaying(port: int) -> AsyncIterator[int]:
    """Run a link to a server in a separate process; yield the link's port.

    Replies come in pieces: a lost segment holds back all bytes behind it.
    """
    near, control = free_port(), free_port()
    words = ["--control", f"127.0.0.1:{control}", "--forward", f"127.0.0.1:{near}=127.0.0.1:{port}"]
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", _LINK, *words)
    try:
        link = LinkControl("127.0.0.1", control)
        while True:
            with suppress(ConnectionError):
                await link.shape(Link(jitter_ms=1, loss=0.05, retransmit_ms=2))
                break
            await asyncio.sleep(0.02)
        yield near
    finally:
        process.kill()
        await process.wait()


@asynccontextmanager
async def pool_behind_link(server: Standalone) -> AsyncIterator[RedisPool]:
    async with delaying(server.data[0].port) as port, pool(server.server) as direct:
        await written(direct, *(([i], [i]) for i in range(_KEYS)))
        through_link = replace(server.server, addresses=(("127.0.0.1", port),))
        async with pool(through_link, budget_s=0.006) as made:
            yield made
            await until(lambda: not made._running)


def test_no_cancelled_lookup_hands_its_reply_to_another_caller(
    redis_server: Standalone, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancellations = 2_000
    errors: list[Exception] = []
    record_failure = RedisPool._record_failure

    def recorded(made: RedisPool, breaker: Any, error: Exception) -> None:
        errors.append(error)
        record_failure(made, breaker, error)

    monkeypatch.setattr(RedisPool, "_record_failure", recorded)
    # Let many lookups run at once, and many of them be late.
    monkeypatch.setattr(redis_pool, "_MAX_RUNNING", 64)
    monkeypatch.setattr(redis_pool, "_LATE_IN_A_ROW", cancellations)

    async def run() -> None:
        async with pool_behind_link(redis_server) as made:
            tally = Tally()

            def goes_on() -> bool:
                """Return whether to go on.

                On a busy machine lookups are skipped for a moment, or nearly all are late.
                """
                done = min(tally.cancelled, made.counters.lookups, 50 * tally.right)
                return done < cancellations

            await disturb(through_pool(made), goes_on, tally)
            assert tally.wrong == 0
            assert made.counters.late > cancellations / 100
            assert made.counters.malformed == 0
            # On a busy machine some replies come later than the socket's timeout. If cancellations
            # broke connections, most lookups would get no reply.
            assert [error for error in errors if not isinstance(error, TimeoutError)] == []
            assert made.counters.failed == len(errors) <= made.counters.lookups / 10

    uvloop.run(run())
