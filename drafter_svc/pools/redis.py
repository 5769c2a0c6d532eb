"""The n-gram pool that all replicas share, in Redis: a disposable cache, whose loss or delay costs guesses and nothing else.

One string for each n-gram holds the tokens that followed it, as little-endian uint32. Keys carry namespace, tokenizer fingerprint
and a digest of the n-gram. Age is bounded by each key's time to live; size by an index (a sorted set by time of writing), from
which the script that writes drops the oldest. What comes back is checked like anything else from the network.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

log = logging.getLogger(__name__)

_BACKOFF_S = (0.5, 10.0)
_SOCKET_TIMEOUT_S = 2.0
_WRITE_BATCH = 256
_WRITE_QUEUE = 16_384
_MAX_TOKENS = 64
# KEYS: the index, then the n-grams. ARGV: now, seconds to live, most entries, "NX" or "", then the values.
_WRITE = """
local now, ttl, most, mode = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
for i = 2, #KEYS do
  local written
  if mode == 'NX' then written = redis.call('SET', KEYS[i], ARGV[i + 3], 'EX', ttl, 'NX')
  else written = redis.call('SET', KEYS[i], ARGV[i + 3], 'EX', ttl) end
  if written then redis.call('ZADD', KEYS[1], now, KEYS[i]) end
end
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - ttl)
local excess = redis.call('ZCARD', KEYS[1]) - most
if excess > 0 then
  local oldest = redis.call('ZPOPMIN', KEYS[1], excess)
  for i = 1, #oldest, 2 do redis.call('DEL', oldest[i]) end
end
redis.call('EXPIRE', KEYS[1], ttl)
"""


@dataclass(frozen=True, slots=True)
class RedisOptions:
    """`budget_s` is how long a lookup may take before the drafter goes on without it."""

    url: str
    namespace: str = "default"
    max_entries: int = 1_000_000
    ttl_s: int = 86_400
    budget_s: float = 0.005
    use_oldest: bool = False


@dataclass(slots=True)
class RedisCounters:
    """What became of lookups and writes."""

    lookups: int = 0
    skipped: int = 0
    late: int = 0
    failed: int = 0
    malformed: int = 0
    written: int = 0
    dropped: int = 0


class RedisPool:
    """Lookups of a whole batch in one round trip, writes in the background. Made and used on a running event loop."""

    def __init__(self, options: RedisOptions, fingerprint: str, vocab_size: int) -> None:
        self.counters = RedisCounters()
        self._options = options
        self._vocab_size = vocab_size
        self._prefix = f"outrider:ngram:{options.namespace}:{fingerprint[:16]}:".encode()
        self._redis: Redis = Redis.from_url(
            options.url, socket_timeout=_SOCKET_TIMEOUT_S, socket_connect_timeout=_SOCKET_TIMEOUT_S, retry_on_timeout=False
        )
        self._script = self._redis.register_script(_WRITE)
        self._writes: asyncio.Queue[tuple[bytes, bytes]] = asyncio.Queue(_WRITE_QUEUE)
        self._running: set[asyncio.Task[Any]] = set()
        self._down_until = 0.0
        self._backoff_s = _BACKOFF_S[0]
        self._writer = asyncio.create_task(self._write_forever())

    @property
    def available(self) -> bool:
        """Whether Redis is believed to answer; after a failure it is left alone for a while that grows."""
        return time.monotonic() >= self._down_until

    def key(self, ngram: Sequence[int]) -> bytes:
        """The n-gram's key."""
        return self._prefix + hashlib.sha256(array("I", ngram).tobytes()).hexdigest()[:32].encode()

    async def lookup(self, queries: Sequence[Sequence[Sequence[int]]]) -> list[list[int]]:
        """For each query, n-grams from the longest to the shortest, the continuation of the first that is known; else empty.

        Never raises and never takes much longer than the budget. A command that is late is not cancelled but left to end on its own
        connection, so that its reply cannot be taken for another's.
        """
        found: list[list[int]] = [[] for _ in queries]
        keys = [self.key(ngram) for query in queries for ngram in query]
        if not keys:
            return found
        if not self.available:
            self.counters.skipped += 1
            return found
        self.counters.lookups += 1
        task: asyncio.Task[Any] = asyncio.create_task(self._fetch(keys))
        self._keep(task)
        done, _ = await asyncio.wait({task}, timeout=self._options.budget_s)
        if not done:
            self.counters.late += 1
            return found
        values = task.result()
        if isinstance(values, list):
            self._spread(queries, values, found)
        return found

    def _spread(self, queries: Sequence[Sequence[Sequence[int]]], values: list[Any], found: list[list[int]]) -> None:
        at = 0
        for row, query in enumerate(queries):
            for value in values[at : at + len(query)]:
                if value is not None and not found[row]:
                    found[row] = self._decode(value)
            at += len(query)

    def offer(self, ngram: Sequence[int], continuation: Sequence[int]) -> None:
        """Have the pair written some time soon; when too many wait, it is dropped and counted."""
        value = array("I", continuation[:_MAX_TOKENS]).tobytes()
        try:
            self._writes.put_nowait((self.key(ngram), value))
        except asyncio.QueueFull:
            self.counters.dropped += 1

    async def aclose(self) -> None:
        """Stop writing and hang up; what was not written is lost."""
        tasks = [self._writer, *self._running]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._redis.aclose()

    async def _fetch(self, keys: list[bytes]) -> list[bytes | str | None] | None:
        try:
            values = list(await self._redis.mget(keys))
        except (RedisError, OSError) as error:
            self._failed(error)
            return None
        self._answered()
        return values

    async def _write_forever(self) -> None:
        while True:
            batch = [await self._writes.get()]
            while len(batch) < _WRITE_BATCH and not self._writes.empty():
                batch.append(self._writes.get_nowait())
            if not self.available:
                self.counters.dropped += len(batch)
                continue
            await self._write(batch)

    async def _write(self, batch: list[tuple[bytes, bytes]]) -> None:
        options = self._options
        mode = "NX" if options.use_oldest else ""
        try:
            await self._script(
                keys=[self._prefix + b"index", *(key for key, _ in batch)],
                args=[int(time.time()), options.ttl_s, options.max_entries, mode, *(value for _, value in batch)],
            )
        except (RedisError, OSError) as error:
            self.counters.dropped += len(batch)
            self._failed(error)
        else:
            self.counters.written += len(batch)
            self._answered()

    def _decode(self, value: object) -> list[int]:
        """Token ids of a value; empty, and counted, when it is not what this pool would have written."""
        if isinstance(value, bytes) and 0 < len(value) <= 4 * _MAX_TOKENS and len(value) % 4 == 0:
            ids = array("I", value).tolist()
            if max(ids) < self._vocab_size:
                return ids
        self.counters.malformed += 1
        return []

    def _failed(self, error: Exception) -> None:
        self.counters.failed += 1
        if self.available:
            log.warning("Redis does not answer (%s); going on with the pool in memory", error)
        self._down_until = time.monotonic() + self._backoff_s * random.uniform(0.75, 1.0)
        self._backoff_s = min(2 * self._backoff_s, _BACKOFF_S[1])

    def _answered(self) -> None:
        if self._backoff_s != _BACKOFF_S[0]:
            log.info("Redis answers again")
        self._backoff_s = _BACKOFF_S[0]

    def _keep(self, task: asyncio.Task[Any]) -> None:
        self._running.add(task)
        task.add_done_callback(self._running.discard)
