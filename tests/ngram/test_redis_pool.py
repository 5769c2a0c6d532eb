"""The pool on real Redis of each topology is shared, bounded and checked, and delays nobody."""

import asyncio
import logging
import os
import time
from dataclasses import replace

import pytest

from drafter_svc.pools import redis_client
from drafter_svc.pools.keys import is_index
from drafter_svc.pools.redis import RedisPool
from tests.ngram.pools import TENANT, found, pool, written
from tests.redis_servers import Deployment, Standalone
from tests.waiting import until


async def test_replicas_find_each_others_n_grams_longest_first(
    deployment: Deployment,
) -> None:
    async with pool(deployment.server) as one, pool(deployment.server) as other:
        await written(one, ([1, 2, 3], [4, 5]), ([3], [9]))
        queries = [[[1, 2, 3], [2, 3], [3]], [[7, 3], [3]], [[8]]]
        assert await found(other, *queries) == [[4, 5], [9], []]
        assert (other.counters.found, other.counters.missed, other.counters.lookups) == (2, 1, 1)


async def test_size_and_age_are_bounded(deployment: Deployment) -> None:
    async with pool(deployment.server, max_entries=160, ttl_s=100) as made:
        await written(made, *(([i], [i + 1]) for i in range(700)))
        await written(made, *(([i], [i + 1]) for i in range(700, 800)))
        assert sum(not is_index(key) for key in deployment.all_keys()) == 160
        # The newest n-grams are kept.
        assert all(await found(made, *([[i]] for i in range(700, 800))))
        for process in deployment.data:
            with process.admin() as client:
                assert all(0 < client.ttl(key) <= 100 for key in client.keys("*"))


async def test_one_tenants_writes_do_not_evict_anothers(deployment: Deployment) -> None:
    async with pool(deployment.server, max_entries=16) as made:
        await written(made, ([1], [2]), tenant="small")
        await written(made, *(([i], [i + 1]) for i in range(200)), tenant="large")
        assert await found(made, [[1]], tenant="small") == [[2]]


async def test_a_pool_closes_at_every_moment_of_a_write(redis_server: Standalone) -> None:
    # On Python 3.11, redis-py swallows a cancellation at one of these moments.
    for steps in range(0, 60, 2):
        async with pool(redis_server.server) as made:
            await written(made, ([1], [2]))
            made.offer(made.tenant(TENANT), [1], [2])
            for _ in range(steps):
                await asyncio.sleep(0)
            async with asyncio.timeout(5):
                await made.aclose()


async def test_the_newest_continuation_wins(deployment: Deployment) -> None:
    async with pool(deployment.server) as made:
        await written(made, ([1], [2]))
        await written(made, ([1], [3]))
        assert await found(made, [[1]]) == [[3]]


async def test_malformed_values_are_counted_and_a_shorter_n_gram_used(
    redis_server: Standalone,
) -> None:
    async with pool(redis_server.server) as made:
        await written(made, ([0], [7]))
        with redis_server.data[0].admin() as client:
            for i, value in enumerate((b"", b"abc", b"x" * 4000, (5000).to_bytes(4, "little"))):
                client.set(made.tenant(TENANT).keys([[i, 0]])[0], value)
        assert await found(made, *([[i, 0], [0]] for i in range(4))) == [[7]] * 4
        assert made.counters.malformed == 4


async def test_a_batch_is_one_round_trip_on_one_server(redis_server: Standalone) -> None:
    async with pool(redis_server.server) as made:
        # Connect first.
        await found(made, [[1]])
        with redis_server.data[0].admin() as client:
            before = client.info("stats")["total_commands_processed"]
            await found(made, *([[i, i + 1], [i + 1]] for i in range(32)))
            # There are two commands: the lookup, and the INFO below.
            assert client.info("stats")["total_commands_processed"] - before == 2


async def test_lookups_go_on_while_redis_is_down_and_resume_after_it(
    redis_server: Standalone, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "drafter_svc.pools.redis"):
        async with pool(redis_server.server) as made:
            await written(made, ([1], [2]))
            redis_server.kill()
            assert await found(made, [[1]]) == [[]]
            started = time.monotonic()
            for _ in range(50):
                assert await found(made, [[1]]) == [[]]
            assert time.monotonic() - started < 5
            redis_server.start()
            await until(lambda: made.available)
            await written(made, ([1], [3]))
            assert await found(made, [[1]]) == [[3]]
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


async def test_a_hanging_redis_delays_no_lookup_and_mixes_up_no_reply(
    redis_server: Standalone, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(redis_client, "_SOCKET_TIMEOUT_S", 0.3)
    async with pool(redis_server.server, budget_s=0.05) as made:
        await written(made, ([1], [2]), ([3], [4]))
        assert await found(made, [[1]]) == [[2]]
        with redis_server.data[0].admin() as client:
            client.execute_command("CLIENT", "PAUSE", 1000)
            assert await found(made, [[1]]) == [[]]
            assert (made.counters.late, made.counters.failed) == (1, 0)
            await until(lambda: made.counters.failed == 1, 2)
            assert "no answer in 0.3 s" in caplog.text
            # The server answers this when the pause is over.
            client.ping()
        await until(lambda: made.available)
        assert await found(made, [[3]]) == [[4]]


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_a_frozen_redis_is_skipped_and_costs_few_connections(
    redis_server: Standalone,
) -> None:
    async with pool(redis_server.server, budget_s=0.005) as made:
        await written(made, ([1], [2]))
        await until_found(made, [[1]], [2])
        files, late = open_files(), made.counters.late
        redis_server.data[0].freeze()
        try:
            frozen_until = time.monotonic() + 1.0
            while time.monotonic() < frozen_until:
                assert await found(made, [[1]]) == [[]]
                await asyncio.sleep(0.001)
        finally:
            redis_server.data[0].thaw()
        # Three lookups are late at first. One more may be late when the breaker lets lookups
        # through again.
        assert 3 <= made.counters.late - late <= 4
        assert made.counters.skipped > 50
        await until_found(made, [[1]], [2])
        assert open_files() <= files + 3


async def until_found(made: RedisPool, ngrams: list[list[int]], continuation: list[int]) -> None:
    """Look up until an answer comes in time; a busy machine may need several lookups."""
    deadline = time.monotonic() + 10.0
    while await found(made, ngrams) != [continuation]:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def test_an_unexpected_client_error_ends_neither_lookups_nor_writes(
    redis_server: Standalone,
) -> None:
    broken = replace(redis_server.server, options={"socket_keepalive_options": {"no": "option"}})
    async with pool(broken) as made:
        for _ in range(2):
            made.offer(made.tenant(TENANT), [1], [2])
            await until(lambda: made._writes.empty())
            assert await found(made, [[1]]) == [[]]
            await until(lambda: made.available and made._write_breaker.available)
        assert made.counters.failed == 4
        assert made.counters.dropped == 2


async def test_writes_beyond_the_queue_are_dropped_and_counted(redis_server: Standalone) -> None:
    async with pool(redis_server.server) as made:
        for i in range(20_000):
            made.offer(made.tenant(TENANT), [i], [1])
        assert made.counters.dropped == 20_000 - 16_384


async def settled(made: RedisPool, offered: int) -> None:
    """Wait until all n-grams that were offered are written or dropped."""
    await until(lambda: made.counters.written + made.counters.dropped == offered)


@pytest.mark.parametrize("policy", ["allkeys-lru", "noeviction"])
async def test_a_redis_short_of_memory_answers_and_warns_at_most_once(
    policy: str, redis_server: Standalone, caplog: pytest.LogCaptureFixture
) -> None:
    async with pool(redis_server.server) as made:
        with redis_server.data[0].admin() as client:
            client.config_set("maxmemory-policy", policy)
            client.config_set("maxmemory", client.info("memory")["used_memory"] + 2_000_000)
            offered = 0
            for start in range(0, 18_000, 3_000):
                for i in range(start, start + 3_000):
                    made.offer(made.tenant(TENANT), [i, i // 7], [1] * 8)
                offered += 3_000
                await settled(made, offered)
                assert await found(made, [[1]]) == [[]]
            if policy == "allkeys-lru":
                assert made.counters.written == offered
                assert client.info("stats")["evicted_keys"] > 1000
                await written(made, ([1], [2]))
                assert await found(made, [[1]]) == [[2]]
            else:
                assert made.counters.dropped > 1000
    assert made.counters.skipped == 0
    assert len(caplog.records) == (policy == "noeviction")
