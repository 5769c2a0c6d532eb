"""The n-gram pool that all replicas share, in Redis: a disposable cache, whose loss or delay costs guesses and nothing else.

One string for each n-gram holds the tokens that followed it, as little-endian uint32; drafter_svc.pools.keys names it.
Age is bounded by each key's time to live; a tenant's size by the indexes of its buckets (sorted sets by time of writing), from
which the script that writes drops the oldest. What comes back is checked like anything else from the network.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from drafter_svc.pools.keys import BUCKETS, PoolKeys, TenantKeys
from drafter_svc.pools.redis_client import RedisClient
from drafter_svc.pools.redis_server import RedisServer
from outrider.clock import Clock, monotonic
from outrider.process.tasks import keep_running

log = logging.getLogger(__name__)

_BACKOFF_S = (0.5, 10.0)
# A warning is not said again for so long.
_WARNED_EVERY_S = 60.0
_WRITE_BATCH = 256
_WRITE_QUEUE = 16_384
_MAX_TOKENS = 64
# Commands under way at once; each has a connection, and more than these are late only where Redis hangs.
_MAX_RUNNING = 64
# KEYS: a bucket's index, then n-grams, whose keys begin with the index's. ARGV: now, seconds to live, most entries, "NX" or "",
# then the values.
_WRITE = """
local index, now, ttl, most, mode = KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
for i = 2, #KEYS do
  local written
  if mode == 'NX' then written = redis.call('SET', KEYS[i], ARGV[i + 3], 'EX', ttl, 'NX')
  else written = redis.call('SET', KEYS[i], ARGV[i + 3], 'EX', ttl) end
  if written then redis.call('ZADD', index, now, string.sub(KEYS[i], #index + 1)) end
end
redis.call('ZREMRANGEBYSCORE', index, '-inf', now - ttl)
local excess = redis.call('ZCARD', index) - most
if excess > 0 then
  local oldest = redis.call('ZPOPMIN', index, excess)
  for i = 1, #oldest, 2 do redis.call('DEL', index .. oldest[i]) end
end
redis.call('EXPIRE', index, ttl)
"""


@dataclass(frozen=True, slots=True)
class RedisOptions:
    """`max_entries` bounds a tenant's n-grams; `budget_s` is how long a lookup may take before the drafter goes on without it."""

    max_entries: int = 1_000_000
    ttl_s: int = 86_400
    budget_s: float = 0.005
    use_oldest: bool = False


@dataclass(slots=True)
class RedisCounters:
    """What became of lookups and writes. `found` and `missed` count queries, `written` and `dropped` n-grams, the rest commands."""

    lookups: int = 0
    found: int = 0
    missed: int = 0
    skipped: int = 0
    late: int = 0
    failed: int = 0
    malformed: int = 0
    written: int = 0
    dropped: int = 0


class Query(NamedTuple):
    """What may have followed these n-grams of a tenant's, given from the longest to the shortest, all ending in the same token."""

    tenant: TenantKeys
    ngrams: Sequence[Sequence[int]]


_Pair = tuple[TenantKeys, Sequence[int], Sequence[int]]
"""An n-gram of a tenant's, and what followed it."""


class _Standing:
    """Whether Redis does what it is asked; after a failure it is left alone for a while that grows."""

    def __init__(self, clock: Clock) -> None:
        self.is_down = False
        self._clock = clock
        self._until = 0.0
        self._backoff_s = _BACKOFF_S[0]

    @property
    def available(self) -> bool:
        return self._clock() >= self._until

    def failed(self) -> None:
        self.is_down = True
        # Commands that were under way together fail together, which is one failure.
        if self.available:
            self._until = self._clock() + self._backoff_s * random.uniform(0.75, 1.0)
            self._backoff_s = min(2 * self._backoff_s, _BACKOFF_S[1])

    def answered(self) -> None:
        self.is_down = False
        self._backoff_s = _BACKOFF_S[0]


class RedisPool:
    """Lookups of a whole batch in one round trip, writes in the background. Made and used on a running event loop.

    `observe` is told the seconds that each lookup's command took to be answered, late ones included.
    """

    def __init__(
        self,
        server: RedisServer,
        keys: PoolKeys,
        fingerprint: str,
        vocab_size: int,
        options: RedisOptions | None = None,
        *,
        counters: RedisCounters | None = None,
        observe: Callable[[float], None] = lambda seconds: None,
        clock: Clock = monotonic,
    ) -> None:
        self.counters = counters or RedisCounters()
        self._keys = keys
        self._fingerprint = fingerprint
        self._vocab_size = vocab_size
        self._options = options or RedisOptions()
        self._observe = observe
        self._clock = clock
        self._client = RedisClient(server)
        self._writes: asyncio.Queue[_Pair] = asyncio.Queue(_WRITE_QUEUE)
        self._running: set[asyncio.Task[Any]] = set()
        # Apart, since a Redis that is full or read-only still answers lookups.
        self._reading, self._writing = _Standing(clock), _Standing(clock)
        self._silent_until = 0.0
        self._writer = keep_running(self._write_forever, "writing to Redis")

    @property
    def available(self) -> bool:
        """Whether Redis is believed to answer lookups."""
        return self._reading.available

    def tenant(self, name: str) -> TenantKeys:
        """The keys to look up and offer a tenant's n-grams with."""
        return self._keys.tenant(name, self._fingerprint)

    async def lookup(self, queries: Sequence[Query]) -> list[list[int]]:
        """For each query the continuation of the first of its n-grams that is known; else empty.

        Never raises and never takes much longer than the budget. A command that is late is not cancelled but left to end on its own
        connection, so that its reply cannot be taken for another's.
        """
        found: list[list[int]] = [[] for _ in queries]
        keys = [key for query in queries for key in query.tenant.keys(query.ngrams)]
        if not keys:
            return found
        if not self.available or len(self._running) >= _MAX_RUNNING:
            self.counters.skipped += 1
            return found
        self.counters.lookups += 1
        task: asyncio.Task[Any] = asyncio.create_task(self._fetch(keys))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        done, _ = await asyncio.wait({task}, timeout=self._options.budget_s)
        if not done:
            self.counters.late += 1
            return found
        if (values := task.result()) is not None:
            self._spread(queries, values, found)
        return found

    def _spread(self, queries: Sequence[Query], values: list[Any], found: list[list[int]]) -> None:
        at = 0
        for row, query in enumerate(queries):
            for value in values[at : at + len(query.ngrams)]:
                if value is not None and (continuation := self._decode(value)):
                    found[row] = continuation
                    break
            at += len(query.ngrams)
        hits = sum(map(bool, found))
        self.counters.found += hits
        self.counters.missed += len(queries) - hits

    def offer(self, tenant: TenantKeys, ngram: Sequence[int], continuation: Sequence[int]) -> None:
        """Have the pair written some time soon; when too many wait, it is dropped and counted."""
        try:
            self._writes.put_nowait((tenant, ngram, continuation))
        except asyncio.QueueFull:
            self.counters.dropped += 1

    async def aclose(self) -> None:
        """Stop writing and hang up; what was not written is lost."""
        tasks = [self._writer, *self._running]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.aclose()

    async def _fetch(self, keys: list[bytes]) -> list[Any] | None:
        started = self._clock()
        try:
            values = await self._client.mget(keys)
        except Exception as error:  # noqa: BLE001  # a client that stumbles must not end drafting, no more than a server that does
            self._failed(self._reading, error)
            return None
        self._observe(self._clock() - started)
        self._answered(self._reading)
        return values

    async def _write_forever(self) -> None:
        while True:
            batch = [await self._writes.get()]
            while len(batch) < _WRITE_BATCH and not self._writes.empty():
                batch.append(self._writes.get_nowait())
            if self._reading.available and self._writing.available:
                await self._write(batch)
            else:
                self.counters.dropped += len(batch)

    async def _write(self, batch: list[_Pair]) -> None:
        """Each bucket's n-grams by a call of the script, since no more than a bucket need be on one server."""
        buckets: dict[bytes, list[tuple[bytes, bytes]]] = {}
        for tenant, ngram, continuation in batch:
            value = array("I", continuation[:_MAX_TOKENS]).tobytes()
            buckets.setdefault(tenant.index(ngram), []).append((tenant.keys([ngram])[0], value))
        options = self._options
        most = -(-options.max_entries // BUCKETS)
        arguments = [round(time.time(), 3), options.ttl_s, most, "NX" if options.use_oldest else ""]
        calls = [
            ([index, *(key for key, _ in pairs)], [*arguments, *(value for _, value in pairs)])
            for index, pairs in buckets.items()
        ]
        try:
            results = await self._client.run(_WRITE, calls)
        except Exception as error:  # noqa: BLE001  # as above
            results = [error] * len(calls)
        failures = [result for result in results if isinstance(result, Exception)]
        for pairs, result in zip(buckets.values(), results, strict=True):
            if isinstance(result, Exception):
                self.counters.dropped += len(pairs)
            else:
                self.counters.written += len(pairs)
        if failures:
            self._failed(self._writing, failures[0])
        else:
            self._answered(self._writing)

    def _decode(self, value: object) -> list[int]:
        """Token ids of a value; empty, and counted, when it is not what this pool would have written."""
        if isinstance(value, bytes) and 0 < len(value) <= 4 * _MAX_TOKENS and len(value) % 4 == 0:
            ids = array("I", value).tolist()
            if max(ids) < self._vocab_size:
                return ids
        self.counters.malformed += 1
        return []

    def _failed(self, standing: _Standing, error: Exception) -> None:
        self.counters.failed += 1
        # A Redis at the limit of its memory takes some writes and not others.
        if (
            not (self._reading.is_down or self._writing.is_down)
            and self._clock() >= self._silent_until
        ):
            self._silent_until = self._clock() + _WARNED_EVERY_S
            what = "lookups" if standing is self._reading else "writes"
            log.warning("Redis fails (%s: %s); going on without its pool", what, error)
        standing.failed()

    def _answered(self, standing: _Standing) -> None:
        was_down = standing.is_down
        standing.answered()
        if was_down and not (self._reading.is_down or self._writing.is_down):
            log.info("Redis answers again")
