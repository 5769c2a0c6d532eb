"""The shared pool on a real Redis: found by all, bounded, hostile until checked, and never waited for."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import redis as sync_redis

from drafter_svc.pools.redis import RedisOptions, RedisPool

FINGERPRINT = "0123456789abcdef0123"


@asynccontextmanager
async def pool(url: str, **options: Any) -> AsyncIterator[RedisPool]:
    fingerprint = options.pop("fingerprint", FINGERPRINT)
    made = RedisPool(RedisOptions(url, **{"budget_s": 0.5, **options}), fingerprint, 4096)
    try:
        yield made
    finally:
        await made.aclose()


async def until(condition: Callable[[], bool], timeout_s: float = 8.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def written(made: RedisPool, *pairs: tuple[list[int], list[int]]) -> None:
    before = made.counters.written
    for ngram, continuation in pairs:
        made.offer(ngram, continuation)
    await until(lambda: made.counters.written >= before + len(pairs))


async def test_what_one_replica_writes_another_finds_the_longest_n_gram_first(redis_server: Any) -> None:
    async with pool(redis_server.url) as one, pool(redis_server.url) as other:
        await written(one, ([1, 2, 3], [4, 5]), ([3], [9]))
        found = await other.lookup([[[1, 2, 3], [2, 3], [3]], [[7, 3], [3]], [[8]]])
        assert found == [[4, 5], [9], []]


async def test_a_batch_is_one_round_trip(redis_server: Any) -> None:
    async with pool(redis_server.url) as made:
        await written(made, ([1], [2]))
        with sync_redis.Redis(port=redis_server.port) as client:
            before = client.info("stats")["total_commands_processed"]
            await made.lookup([[[i, i + 1], [i]] for i in range(32)])
            assert client.info("stats")["total_commands_processed"] - before == 2  # the lookup, and this question


async def test_namespaces_and_tokenizers_are_apart(redis_server: Any) -> None:
    async with pool(redis_server.url) as one:
        await written(one, ([1], [2]))
        async with pool(redis_server.url, namespace="other") as other, pool(redis_server.url, fingerprint="f" * 20) as foreign:
            assert await other.lookup([[[1]]]) == [[]]
            assert await foreign.lookup([[[1]]]) == [[]]


async def test_size_and_age_are_bounded(redis_server: Any) -> None:
    async with pool(redis_server.url, max_entries=10, ttl_s=100) as made:
        await written(made, *(([i], [i + 1]) for i in range(300)))
        with sync_redis.Redis(port=redis_server.port) as client:
            keys = [key for key in client.keys("outrider:*") if not key.endswith(b"index")]
            assert len(keys) == 10
            assert all(0 < client.ttl(key) <= 100 for key in keys)


async def test_the_newest_continuation_wins_unless_the_oldest_is_wanted(redis_server: Any) -> None:
    async with pool(redis_server.url) as newest, pool(redis_server.url, use_oldest=True, namespace="old") as oldest:
        for made, expected in ((newest, [3]), (oldest, [2])):
            await written(made, ([1], [2]))
            await written(made, ([1], [3]))
            assert await made.lookup([[[1]]]) == [expected]


async def test_rubbish_in_redis_is_dropped_and_counted(redis_server: Any) -> None:
    async with pool(redis_server.url) as made:
        with sync_redis.Redis(port=redis_server.port) as client:
            for i, value in enumerate((b"", b"abc", b"x" * 4000, (5000).to_bytes(4, "little"))):
                client.set(made.key([i]), value)
        assert await made.lookup([[[i]] for i in range(4)]) == [[]] * 4
        assert made.counters.malformed == 4


async def test_when_redis_dies_lookups_go_on_at_once_and_it_is_rejoined_when_it_is_back(redis_server: Any) -> None:
    async with pool(redis_server.url) as made:
        await written(made, ([1], [2]))
        redis_server.kill()
        assert await made.lookup([[[1]]]) == [[]]
        started = time.monotonic()
        for _ in range(50):
            assert await made.lookup([[[1]]]) == [[]]
        assert time.monotonic() - started < 0.5
        redis_server.start()
        await until(lambda: made.available)
        await written(made, ([1], [3]))
        await until(lambda: made.available)
        assert await made.lookup([[[1]]]) == [[3]]


async def test_a_redis_that_was_never_there_costs_nothing() -> None:
    async with pool("redis://127.0.0.1:1/0") as made:
        assert await made.lookup([[[1]]]) == [[]]
        assert made.counters.failed == 1
        for _ in range(20):
            made.offer([1], [2])


async def test_a_wrong_password_is_a_failure_like_any_other(redis_server: Any) -> None:
    async with pool(redis_server.url.replace("redis://", "redis://nobody:wrong@")) as made:
        assert await made.lookup([[[1]]]) == [[]]
        assert made.counters.failed == 1


async def test_more_writes_than_are_taken_are_dropped_and_counted(redis_server: Any) -> None:
    async with pool(redis_server.url) as made:
        for i in range(20_000):
            made.offer([i], [1])
        assert made.counters.dropped == 20_000 - 16_384


async def test_late_replies_and_cancelled_lookups_never_reach_another_caller(redis_server: Any) -> None:
    """Through a proxy that delays at random, with a budget that often runs out, every answer is empty or the right one."""
    rng = random.Random(0)
    async with delaying_proxy(redis_server.port, rng) as port, pool(f"redis://127.0.0.1:{port}/0", budget_s=0.004) as made:
        async with pool(redis_server.url) as direct:
            await written(direct, *(([i], [i + 1000]) for i in range(200)))
        right = 0
        for _ in range(600):
            wanted = [rng.randrange(200) for _ in range(3)]
            lookup = asyncio.create_task(made.lookup([[[i]] for i in wanted]))
            if rng.random() < 0.2:
                await asyncio.sleep(rng.random() * 0.003)
                lookup.cancel()
            [answer] = await asyncio.gather(lookup, return_exceptions=True)
            if isinstance(answer, asyncio.CancelledError):
                continue
            for i, found in zip(wanted, answer, strict=True):
                assert found in ([], [i + 1000])
                right += found != []
        assert right > 50
        assert made.counters.late > 50


@asynccontextmanager
async def delaying_proxy(port: int, rng: random.Random) -> AsyncIterator[int]:
    serving: set[asyncio.Task[Any]] = set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay: bool) -> None:
        while data := await reader.read(65_536):
            if delay:
                await asyncio.sleep(rng.random() * 0.008)
            writer.write(data)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        serving.add(task)
        upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            await asyncio.gather(pump(reader, upstream_writer, False), pump(upstream_reader, writer, True))
        except (asyncio.CancelledError, OSError):
            pass  # the test is over, or a side hung up
        finally:
            for end in (writer, upstream_writer):
                end.close()
                await asyncio.gather(end.wait_closed(), return_exceptions=True)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)
