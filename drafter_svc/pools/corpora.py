"""The suffix trees of each tenant, and the texts that they share with other replicas by Redis.

The trees are Arctic Inference's, in C++. Without Redis they hold the latest texts of this process.
With Redis, the trees are a copy of Redis: a background task writes the texts that ended, and reads
the texts of other replicas. The task also drops each ended text that Redis no longer has, because
the text was erased, is too old or is beyond the bound. While Redis fails, the trees keep what they
hold, and guesses are all that is lost. Drafting never waits for Redis.
"""

from __future__ import annotations

import asyncio
import itertools
from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from contextlib import aclosing
from importlib import import_module
from typing import Any

from drafter_svc.pools.keys import TextKeys
from drafter_svc.pools.redis import OutageLog
from drafter_svc.pools.redis_client import RedisClient
from drafter_svc.pools.texts import MAX_TEXT_TOKENS, MAX_TOKEN_ID, TextPool
from outrider.errors import OutriderError, Reason
from outrider.process.clock import Clock, monotonic
from outrider.process.tasks import watch

MAX_TREE_DEPTH = 64
"""The maximum number of tokens of a matched suffix."""
# The maximum number of tenants with trees. A new tenant replaces the least recently seen tenant.
_MAX_CORPORA = 64
# Every `_SYNC_S` seconds the task looks for tenants that changed. Every `_IDLE_S` seconds it also
# compares a tenant without changes with Redis, so that texts of other replicas come, and erased
# texts go.
_SYNC_S = 0.5
_IDLE_S = 10.0
# The wait after a failure of Redis.
_RETRY_S = 2.0
# The maximum number of ended texts of a tenant that wait for Redis.
_MAX_UNWRITTEN = 256
# The maximum number of texts that are read at once, and in one comparison of a tenant with Redis.
_READ_BATCH = 32
_MAX_READ = 256
# A text from Redis is inserted in slices of this many tokens. Drafting goes on between slices.
_SLICE_TOKENS = 64


class TenantTrees:
    """One tenant's suffix trees. With `keys`, ended texts have digests, as in Redis."""

    def __init__(self, cache: Any, max_texts: int, keys: TextKeys | None) -> None:
        """`cache` is Arctic Inference's. It names texts by numbers or digests.

        Redis lists at most `max_texts`.
        """
        self.cache = cache
        self.keys = keys
        self._max_texts = max_texts
        self.unwritten: dict[bytes, bytes] = {}
        """The values of ended texts that wait for Redis, by digest."""
        self.changed_at = 0.0
        """When a text last began or ended."""
        self.compared_at = 0.0
        """When the last comparison without an error began; 0 if it left texts to read."""
        # Maps the digest of each ended text to the text's name in the cache, or to None if Redis
        # lists the text but does not have it.
        self._names: dict[bytes, int | bytes | None] = {}

    def begin(self, number: int, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Add a sequence."""
        self.cache.start_request(number, prompt)
        self.cache.add_active_response(number, output)

    def end(self, number: int, output: Sequence[int]) -> bool:
        """Keep the output of a sequence that ended, for later requests and for Redis.

        Returns False if too many texts wait for Redis, or if a token's id is above MAX_TOKEN_ID.
        Redis then never gets this text.
        """
        self.cache.stop_request(number)
        text = output[:MAX_TEXT_TOKENS]
        if self.keys is None:
            return True
        if not text or max(text) > MAX_TOKEN_ID:
            self._evict(number)
            return not text
        digest = self.keys.digest(text)
        # The trees hold equal texts once, as Redis does.
        self._drop(digest)
        self._names[digest] = number
        # While Redis fails, nothing else bounds the names.
        if len(self._names) > 2 * self._max_texts:
            self._drop(next(iter(self._names)))
        if digest not in self.unwritten and len(self.unwritten) >= _MAX_UNWRITTEN:
            return False
        self.unwritten[digest] = array("I", text).tobytes()
        return True

    def missing(self, digests: Sequence[bytes]) -> list[bytes]:
        """Return the digests of texts that the trees lack: not read from Redis yet, or dropped."""
        return [digest for digest in digests if not self._knows(digest)]

    def _knows(self, digest: bytes) -> bool:
        name = self._names.get(digest, digest)
        # The cache itself may have dropped the text as its oldest.
        return name is None or name in self.cache.cached_requests

    async def keep_only(self, digests: Collection[bytes]) -> None:
        """Drop ended texts that are neither in `digests` nor unwritten.

        Other tasks run in between.
        """
        for digest in self._names.keys() - digests:
            if digest not in self.unwritten:
                self._drop(digest)
                await asyncio.sleep(0)

    def _drop(self, digest: bytes) -> None:
        self._evict(self._names.pop(digest, None))

    def _evict(self, name: int | bytes | None) -> None:
        if name is not None and name in self.cache.cached_requests:
            self.cache.evict_cached_response(name)

    def forget_unwritten(self) -> int:
        """Forget the texts that wait for Redis. Returns their number."""
        count = len(self.unwritten)
        self.unwritten.clear()
        return count

    async def insert(self, digest: bytes, text: Sequence[int]) -> None:
        """Add a text that was read from Redis, if the trees lack it. Other tasks run meanwhile."""
        if self._knows(digest):
            return
        if not text:
            self._names[digest] = None
            return
        self.cache.start_request(digest, [])
        self._names[digest] = digest
        try:
            for start in range(0, len(text), _SLICE_TOKENS):
                self.cache.add_active_response(digest, text[start : start + _SLICE_TOKENS])
                await asyncio.sleep(0)
        # The trees may have only a part of the text.
        except BaseException:
            self._drop(digest)
            raise
        finally:
            self.cache.stop_request(digest)


class Corpora:
    """The trees of each tenant, for the ids of one tokenizer. Connections share them.

    With `pool`, texts are shared through Redis while at least one connection has joined and has not
    left. Raises OutriderError(INVALID_VALUE) if the package arctic-inference is not installed.
    """

    def __init__(
        self,
        max_cached_requests: int,
        *,
        is_public: bool = False,
        pool: TextPool | None = None,
        clock: Clock = monotonic,
    ) -> None:
        """`is_public` says whether all tenants have the same trees."""
        self._max_cached_requests = max_cached_requests
        self._is_public = is_public
        self._pool = pool
        self._clock = clock
        self._log = OutageLog(clock)
        self._has_failed = False
        self._connections = 0
        self._task: asyncio.Task[None] | None = None
        self._numbers = itertools.count()
        self._corpora: OrderedDict[str, TenantTrees] = OrderedDict()
        try:
            package = import_module("arctic_inference.suffix_decoding")
        except ImportError as cause:
            message = (
                "family: suffix needs the package arctic-inference; "
                "in Outrider's sources, pip install '.[suffix]'"
            )
            raise OutriderError(Reason.INVALID_VALUE, message, "family") from cause
        self._make: Callable[..., Any] = package.SuffixDecodingCache

    def begin(
        self, tenant: str, prompt: Sequence[int], output: Sequence[int]
    ) -> tuple[TenantTrees, int]:
        """Add a sequence to its tenant's trees; return the trees and the sequence's number."""
        trees = self._trees(tenant)
        number = next(self._numbers)
        trees.begin(number, prompt, output)
        trees.changed_at = self._clock()
        return trees, number

    def end(self, trees: TenantTrees, number: int, output: Sequence[int]) -> None:
        """Keep the output of a sequence that ended."""
        if not trees.end(number, output) and self._pool is not None:
            self._pool.counters.dropped += 1
        trees.changed_at = self._clock()

    def _trees(self, tenant: str) -> TenantTrees:
        key = "" if self._is_public else tenant
        if key not in self._corpora:
            keys = self._pool.tenant(key) if self._pool is not None else None
            # Running requests take places too. With Redis, they must not push out what Redis has.
            places = self._max_cached_requests * (1 if keys is None else 2)
            cache = self._make(MAX_TREE_DEPTH, places)
            self._corpora[key] = TenantTrees(cache, self._max_cached_requests, keys)
        self._corpora.move_to_end(key)
        while len(self._corpora) > _MAX_CORPORA:
            _, oldest = self._corpora.popitem(last=False)
            self._forget_unwritten(oldest)
        return self._corpora[key]

    def _forget_unwritten(self, trees: TenantTrees) -> None:
        count = trees.forget_unwritten()
        if self._pool is not None:
            self._pool.counters.dropped += count

    def join(self) -> None:
        """Share texts for one more connection. An event loop must run."""
        self._connections += 1
        if self._pool is not None and self._task is None:
            self._task = watch(self._share(self._pool), "sharing texts by Redis")

    async def leave(self) -> None:
        """Share texts for one connection less. Without connections, no text waits for Redis.

        A text that waited for the next connection could reach Redis long after its tenant was
        erased there.
        """
        self._connections -= 1
        if self._connections == 0 and self._task is not None:
            for trees in self._corpora.values():
                self._forget_unwritten(trees)
            task, self._task = self._task, None
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _share(self, pool: TextPool) -> None:
        # On Python 3.11, redis-py can lose a cancellation.
        while self._task is asyncio.current_task():
            try:
                # Each new client shows the present certificate.
                async with aclosing(pool.connect()) as client:
                    while self._task is asyncio.current_task():
                        began = self._clock()
                        await self._compare_all(pool, client)
                        # Leave at least half of the time to drafting.
                        await asyncio.sleep(max(_SYNC_S, self._clock() - began))
            # Neither a faulty server nor a bug in the client may end the sharing.
            except Exception as error:  # noqa: BLE001
                self._record_failure(pool, error)
                await asyncio.sleep(_RETRY_S)

    def _record_failure(self, pool: TextPool, error: Exception) -> None:
        pool.counters.failed += 1
        if not self._has_failed:
            self._log.failed("texts", pool.server.reason(error))
        self._has_failed = True

    async def _compare_all(self, pool: TextPool, client: RedisClient) -> None:
        """Compare with Redis the trees that changed, or that were not compared for a while.

        A tenant's failure does not stop the comparisons of other tenants. Raises the first failure
        at the end.
        """
        failure: Exception | None = None
        for trees in list(self._corpora.values()):
            if self._task is not asyncio.current_task():
                return
            now = self._clock()
            if trees.changed_at >= trees.compared_at or now >= trees.compared_at + _IDLE_S:
                try:
                    is_complete = await _compare(trees, pool, client)
                except Exception as error:  # noqa: BLE001
                    failure = failure or error
                else:
                    trees.compared_at = now if is_complete else 0.0
        if failure is not None:
            raise failure
        if self._has_failed:
            self._has_failed = False
            self._log.answers_again()


async def _compare(trees: TenantTrees, pool: TextPool, client: RedisClient) -> bool:
    """Write the texts that ended, read texts of other replicas, and drop texts that are gone.

    Returns False if there are more texts to read. Raises an exception if Redis fails. If Redis
    refuses only the write, the reading and dropping are done before the exception is raised.
    """
    if (keys := trees.keys) is None:
        return True
    refusal: Exception | None = None
    if values := dict(trees.unwritten):
        try:
            await pool.write(client, keys, values)
        except Exception as error:  # noqa: BLE001
            refusal = error
        else:
            for digest in values:
                trees.unwritten.pop(digest, None)
    digests = await pool.digests(client, keys)
    await trees.keep_only(digests)
    missing = trees.missing(digests)
    for start in range(0, min(len(missing), _MAX_READ), _READ_BATCH):
        batch = missing[start : start + _READ_BATCH]
        for digest, text in zip(batch, await pool.read(client, keys, batch), strict=True):
            await trees.insert(digest, text)
    if refusal is not None:
        raise refusal
    return len(missing) <= _MAX_READ
