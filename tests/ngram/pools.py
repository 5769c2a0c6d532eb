"""Pools in Redis for tests, with helpers to write and to look up."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from drafter_svc.pools.keys import PoolKeys
from drafter_svc.pools.redis import Query, RedisOptions, RedisPool
from outrider.process.redis.server import RedisServer
from tests.waiting import until

FINGERPRINT = "0123456789abcdef0123"
SECRET = b"a secret of some length"
TENANT = "tenant"

Ngrams = list[list[int]]


@asynccontextmanager
async def pool(server: RedisServer, **options: Any) -> AsyncIterator[RedisPool]:
    """Yield one replica's pool, with a lookup budget of 2 s.

    `options` are parameters of PoolKeys, RedisPool and RedisOptions.
    """
    keys = PoolKeys(options.pop("secret", SECRET), public=options.pop("public", False))
    fingerprint = options.pop("fingerprint", FINGERPRINT)
    observe = options.pop("observe", lambda seconds: None)
    redis_options = RedisOptions(**{"budget_s": 2.0, **options})
    made = RedisPool(server, keys, fingerprint, 4096, redis_options, observe=observe)
    try:
        yield made
    finally:
        await made.aclose()


async def written(
    made: RedisPool, *pairs: tuple[list[int], list[int]], tenant: str = TENANT
) -> None:
    """Offer (n-gram, continuation) pairs, and wait until Redis has them."""
    before = made.counters.written
    keys = made.tenant(tenant)
    for ngram, continuation in pairs:
        made.offer(keys, ngram, continuation)
    await until(lambda: made.counters.written >= before + len(pairs))


async def found(made: RedisPool, *queries: Ngrams, tenant: str = TENANT) -> list[list[int]]:
    """Look up the n-grams of several queries of one tenant."""
    return await made.lookup([Query(made.tenant(tenant), ngrams) for ngrams in queries])
