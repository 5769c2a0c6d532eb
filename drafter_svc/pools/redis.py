"""The n-gram pool in Redis that all replicas share. If Redis fails, only guesses are lost.

Each n-gram has one string: the tokens that followed it, as little-endian uint32. keys.py makes its
key. Each key has a time to live. Each bucket has an index, a sorted set of its n-grams by time of
writing; the script that writes also drops the oldest n-grams, and so bounds a tenant's size. Values
read from Redis are checked like any other input from the network.
"""

from __future__ import annotations

import asyncio
import logging
import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from drafter_svc.pools.keys import BUCKETS, PoolKeys, TenantKeys
from drafter_svc.pools.redis_client import RedisClient, token_ids
from outrider.process.clock import Clock, monotonic
from outrider.process.redis.server import RedisServer
from outrider.process.tasks import keep_running, watch

log = logging.getLogger(__name__)

# The first and the longest time that a circuit breaker stays open.
_BACKOFF_S = (0.5, 10.0)
# Warnings for the same reason are logged at most once in this time.
_WARNING_INTERVAL_S = 60.0
_WRITE_BATCH = 256
_WRITE_QUEUE = 16_384
_MAX_TOKENS = 64
# The maximum number of lookups at the same time, and so of connections to Redis for them. These
# connections stay open. A connection to a verifier waits for one lookup at a time, so nobody waits
# for the other running lookups any more: they are late.
_MAX_RUNNING = 4
# The number of late lookups in a row that count as a failure.
_LATE_IN_A_ROW = 3


@dataclass(frozen=True, slots=True)
class RedisOptions:
    """The options of a pool in Redis."""

    max_entries: int = 1_000_000
    """The maximum number of n-grams of a tenant."""
    ttl_s: int = 86_400
    """Time after which Redis drops an n-gram that was not written again."""
    budget_s: float = 0.005
    """Time for a lookup, after which the drafter goes on without its result."""


@dataclass(slots=True)
class RedisCounters:
    """Counts of a pool's lookups and writes.

    `found` and `missed` count queries, `written` and `dropped` n-grams, `malformed` values, and all
    other fields commands. In a pool of texts, `found`, `missed`, `written` and `dropped` count
    texts.
    """

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
    """A tenant's n-grams to look up: the longest first, and all with the same last token."""

    tenant: TenantKeys
    ngrams: Sequence[Sequence[int]]


_Write = tuple[TenantKeys, Sequence[int], Sequence[int]]
"""The tenant, an n-gram, and the tokens that followed it."""


class _CircuitBreaker:
    """Blocks commands for a while after a failure; the time doubles with each failure.

    After that time commands are let through again. The first success resets the backoff.
    """

    def __init__(self, name: str, clock: Clock) -> None:
        """`name` names the guarded commands in the log."""
        self.name = name
        self.has_failed = False
        """True if the last command failed."""
        self._clock = clock
        self._open_until = 0.0
        self._backoff_s = _BACKOFF_S[0]

    @property
    def available(self) -> bool:
        """True if commands are let through."""
        return self._clock() >= self._open_until

    def record_failure(self) -> None:
        """Open the breaker for the backoff, and double the backoff."""
        self.has_failed = True
        # Commands that ran at the same time fail together. That counts as one failure.
        if self.available:
            self._open_until = self._clock() + self._backoff_s * random.uniform(0.75, 1.0)
            self._backoff_s = min(2 * self._backoff_s, _BACKOFF_S[1])

    def record_success(self) -> None:
        """Reset the backoff."""
        self.has_failed = False
        self._backoff_s = _BACKOFF_S[0]


class OutageLog:
    """Logs when Redis begins to fail, and when it answers again."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._next_warning_at = 0.0
        self._warned_of = ""

    def failed(self, commands: str, reason: str) -> None:
        """Log that these commands began to fail.

        Limit the warnings: a Redis at its memory limit takes some writes and refuses others.
        """
        if self._clock() >= self._next_warning_at or reason != self._warned_of:
            self._warned_of = reason
            self._next_warning_at = self._clock() + _WARNING_INTERVAL_S
            log.warning("Redis fails (%s: %s); drafting without its pool", commands, reason)

    def answers_again(self) -> None:
        """Log that Redis answers again."""
        log.info("Redis answers again")


class RedisPool:
    """Looks up a whole batch in one round trip, and writes in the background.

    The NgramFamily of one connection makes the pool, and calls it on a running event loop. Nothing
    runs on another thread. `observe` gets the seconds that each lookup took, late lookups included.
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
        self._server = server
        self._stamp = server.tls and server.tls.stamp()
        self._client = RedisClient(server)
        self._writes: asyncio.Queue[_Write] = asyncio.Queue(_WRITE_QUEUE)
        self._is_closed = False
        self._running: set[asyncio.Task[Any]] = set()
        self._closing: set[asyncio.Task[None]] = set()
        # A breaker for lookups and one for writes, since a Redis that is full or read-only still
        # answers lookups.
        self._lookup_breaker = _CircuitBreaker("lookups", clock)
        self._write_breaker = _CircuitBreaker("writes", clock)
        self._late_in_a_row = 0
        self._log = OutageLog(clock)
        self._writer = keep_running(self._write_forever, "writing to Redis")

    @property
    def available(self) -> bool:
        """True if lookups are sent to Redis."""
        return self._lookup_breaker.available

    def tenant(self, name: str) -> TenantKeys:
        """Return the keys of a tenant's n-grams, for `lookup` and `offer`."""
        return self._keys.tenant(name, self._fingerprint)

    async def lookup(self, queries: Sequence[Query]) -> list[list[int]]:
        """Return for each query the continuation of its first known n-gram; empty if none is known.

        Never raises, and returns soon after `budget_s` at the latest. A late command is not
        cancelled: it ends on its own connection, so no other command can get its reply.
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
            self._record_late()
            return found
        if (values := task.result()) is not None:
            self._late_in_a_row = 0
            self._record_success(self._lookup_breaker)
            self._spread(queries, values, found)
        return found

    def _spread(self, queries: Sequence[Query], values: list[Any], found: list[list[int]]) -> None:
        """Set `found` to each query's first valid value; `values` has a value for each n-gram."""
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
        """Queue an n-gram for writing. If the queue is full, drop and count it."""
        try:
            self._writes.put_nowait((tenant, ngram, continuation))
        except asyncio.QueueFull:
            self.counters.dropped += 1

    async def aclose(self) -> None:
        """Stop writing and close the connections. Queued n-grams are lost."""
        # On Python 3.11, asyncio.wait_for, which redis-py uses, can lose a cancellation.
        self._is_closed = True
        tasks = [self._writer, *self._running]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*self._closing, return_exceptions=True)
        await self._client.aclose()

    async def _fetch(self, keys: list[bytes]) -> list[Any] | None:
        """Return the value of each key, or None if Redis failed."""
        started = self._clock()
        try:
            values = await self._client.mget(keys)
        # Neither a faulty server nor a bug in the client may end drafting.
        except Exception as error:  # noqa: BLE001
            self._record_failure(self._lookup_breaker, error)
            return None
        self._observe(self._clock() - started)
        return values

    async def _write_forever(self) -> None:
        while not self._is_closed:
            batch = [await self._writes.get()]
            while len(batch) < _WRITE_BATCH and not self._writes.empty():
                batch.append(self._writes.get_nowait())
            if self._write_breaker.available:
                await self._write(batch)
            else:
                self.counters.dropped += len(batch)

    async def _write(self, batch: list[_Write]) -> None:
        """Write each bucket's n-grams with one call of the script: a bucket is on one server."""
        buckets: dict[bytes, list[tuple[bytes, bytes]]] = {}
        for tenant, ngram, continuation in batch:
            value = array("I", continuation[:_MAX_TOKENS]).tobytes()
            buckets.setdefault(tenant.index(ngram), []).append((tenant.keys([ngram])[0], value))
        options = self._options
        bucket_entries = -(-options.max_entries // BUCKETS)
        try:
            results = await self._client.store(buckets, options.ttl_s, bucket_entries)
        # Neither a faulty server nor a bug in the client may end the writer.
        except Exception as error:  # noqa: BLE001
            results = [error] * len(buckets)
        failures = [result for result in results if isinstance(result, Exception)]
        for pairs, result in zip(buckets.values(), results, strict=True):
            if isinstance(result, Exception):
                self.counters.dropped += len(pairs)
            else:
                self.counters.written += len(pairs)
        if failures:
            self._record_failure(self._write_breaker, failures[0])
        else:
            self._record_success(self._write_breaker)

    def _decode(self, value: object) -> list[int]:
        """Return the token ids of a value; empty, and counted, if the value is malformed."""
        ids = token_ids(value, _MAX_TOKENS, self._vocab_size)
        self.counters.malformed += not ids
        return ids

    @property
    def _has_failed(self) -> bool:
        return self._lookup_breaker.has_failed or self._write_breaker.has_failed

    def _record_late(self) -> None:
        """Count a lookup that took longer than its budget. After a few in a row, block lookups.

        Only a lookup in time resets the count. A late lookup is useless, even if Redis answers it.
        """
        self.counters.late += 1
        self._late_in_a_row += 1
        if self._late_in_a_row >= _LATE_IN_A_ROW:
            budget_ms = 1000 * self._options.budget_s
            self._open(self._lookup_breaker, f"no answer in {budget_ms:g} ms")

    def _record_failure(self, breaker: _CircuitBreaker, error: Exception) -> None:
        self.counters.failed += 1
        self._open(breaker, self._server.reason(error))
        self._renew()

    def _open(self, breaker: _CircuitBreaker, reason: str) -> None:
        """Block the commands of a breaker for a while, and log that."""
        if not self._has_failed:
            self._log.failed(breaker.name, reason)
        breaker.record_failure()

    def _renew(self) -> None:
        """Connect anew if the certificate has changed; redis-py's connections keep the old one."""
        stamp = self._server.tls and self._server.tls.stamp()
        if stamp != self._stamp:
            self._stamp = stamp
            closing = watch(self._client.aclose(), "closing earlier connections to Redis")
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
            self._client = RedisClient(self._server)

    def _record_success(self, breaker: _CircuitBreaker) -> None:
        had_failed = breaker.has_failed
        breaker.record_success()
        if had_failed and not self._has_failed:
            self._log.answers_again()
