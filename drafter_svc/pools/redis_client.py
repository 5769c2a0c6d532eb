"""A client with the same few commands for one server and for a cluster.

redis-py's clients do the work: they find a cluster's slots, and follow slots that move. No command
waits longer than a socket's timeout. A command that times out closes its connection, so that no
other command can get its reply.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from hiredis import pack_command
from redis.asyncio import RedisCluster
from redis.asyncio.connection import AbstractConnection, ConnectionPool
from redis.exceptions import InvalidResponse, RedisClusterException, RedisError

from outrider.process.redis.server import RedisServer, close

# The exceptions of a Redis that is lost or slow, or that refuses a command.
FAILURES = (RedisError, RedisClusterException, OSError)

_SOCKET_TIMEOUT_S = 2.0
_SCAN_COUNT = 1000
# KEYS: a bucket's index, then keys of that bucket, which begin with the index's key. ARGV: the
# present time, the seconds to live, the maximum number of entries in the bucket, then one value for
# each key.
_WRITE = """
local index, now, ttl, most = KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[3])
for i = 2, #KEYS do
  redis.call('SET', KEYS[i], ARGV[i + 2], 'EX', ttl)
  redis.call('ZADD', index, now, string.sub(KEYS[i], #index + 1))
end
redis.call('ZREMRANGEBYSCORE', index, '-inf', now - ttl)
local excess = redis.call('ZCARD', index) - most
if excess > 0 then
  local oldest = redis.call('ZPOPMIN', index, excess)
  for i = 1, #oldest, 2 do redis.call('DEL', index .. oldest[i]) end
end
redis.call('EXPIRE', index, ttl)
"""


def token_ids(value: object, most: int, vocab_size: int) -> list[int]:
    """Return the token ids of a value of Redis, little-endian uint32.

    The result is empty if the value does not have 1 to `most` ids of the vocabulary.
    """
    if isinstance(value, bytes) and 0 < len(value) <= 4 * most and len(value) % 4 == 0:
        ids = array("I", value).tolist()
        if max(ids) < vocab_size:
            return ids
    return []


def _checked_list(reply: Any) -> list[Any]:
    """Return the reply if it is a list.

    Raises InvalidResponse for any other reply. The error does not quote it, since it may be vast.
    """
    if not isinstance(reply, list):
        raise InvalidResponse(f"a reply is no list, but of the type {type(reply).__name__}")
    return reply


class RedisClient:
    """A few commands for one Redis or one cluster.

    The client connects when it sends its first command. Make it and call it on a running event
    loop. Every command raises one of FAILURES if Redis fails.
    """

    def __init__(self, server: RedisServer) -> None:
        self._client = server.client(_SOCKET_TIMEOUT_S, _SOCKET_TIMEOUT_S)
        self._lookups = self._client
        if not server.is_cluster:
            # Lookups have separate connections without a socket timeout; `_ask` has a timeout
            # instead. With a socket timeout and a Python before 3.12, redis-py makes a task for
            # each command that it sends, which takes a third of a lookup's time.
            self._lookups = server.client(_SOCKET_TIMEOUT_S, _SOCKET_TIMEOUT_S, socket_timeout=None)

    async def mget(self, keys: list[bytes]) -> list[Any]:
        """Return the values of the keys, in their order; None for a key that does not exist.

        A cluster gets one command for each slot. If only some slots fail, the values of their keys
        are None as well.
        """
        if not isinstance(self._lookups, RedisCluster):
            command = pack_command(("MGET", *keys))  # type: ignore[arg-type]  # typed for one word
            return _checked_list(await self._ask(self._lookups.connection_pool, command))
        parts = await self._each_slot(self._lookups, "MGET", keys)
        values: dict[bytes, Any] = {}
        for part, result in parts:
            if not isinstance(result, Exception):
                values.update(zip(part, _checked_list(result), strict=True))
        if not values:
            raise parts[0][1]
        return [values.get(key) for key in keys]

    async def _ask(self, connections: ConnectionPool, command: bytes) -> Any:
        """Return the reply to a packed command. Raises TimeoutError after `_SOCKET_TIMEOUT_S`.

        The method does what redis-py's execute_command does. But execute_command packs commands in
        Python, and takes twice as long.
        """

        async def exchange() -> Any:
            await connection.send_packed_command(command)
            return await connection.read_response()

        try:
            async with asyncio.timeout(_SOCKET_TIMEOUT_S):
                taken = connections.get_connection()  # type: ignore[no-untyped-call]  # untyped
                connection: AbstractConnection = await taken
                try:
                    return await connection.retry.call_with_retry(
                        exchange, lambda error: connection.disconnect()
                    )
                finally:
                    await connections.release(connection)
        except TimeoutError as cause:
            raise TimeoutError(f"no answer in {_SOCKET_TIMEOUT_S} s") from cause

    async def store(
        self, buckets: Mapping[bytes, Sequence[tuple[bytes, bytes]]], ttl_s: int, most: int
    ) -> list[Any]:
        """Set the (key, value) pairs of each bucket, in one round trip to each server.

        A bucket is named by its index's key. A bucket keeps its `most` newest entries for at most
        `ttl_s`. Returns for each bucket None, or the exception with which it failed.
        """
        arguments = [round(time.time(), 3), ttl_s, most]
        pipeline: Any = self._client.pipeline(transaction=False)
        for index, pairs in buckets.items():
            keys = [index, *(key for key, _ in pairs)]
            values = [value for _, value in pairs]
            # Send the script's text, not its digest: it is short, and no server can have lost it.
            pipeline.eval(_WRITE, len(keys), *keys, *arguments, *values)
        return await self._execute(pipeline)

    async def newest(self, index: bytes, max_age_s: int, most: int) -> list[Any]:
        """Return the `most` newest entries of a bucket that are not older than `max_age_s`.

        An entry is the part of its key after the index's key. The newest entry comes first.
        """
        since = time.time() - max_age_s
        found: Any = self._client.zrevrangebyscore(index, "+inf", since, start=0, num=most)
        return _checked_list(await found)

    async def _each_slot(
        self, cluster: RedisCluster, command: str, keys: list[bytes]
    ) -> list[tuple[list[bytes], Any]]:
        """Send a command of many keys once for each slot, to all servers at the same time.

        Returns for each slot its keys, and the result or the exception.
        """
        slots: dict[int, list[bytes]] = {}
        for key in keys:
            slots.setdefault(cluster.keyslot(key), []).append(key)
        await cluster.initialize()
        pipeline: Any = cluster.pipeline()
        for slot, part in slots.items():
            # Name the node, so that redis-py does not compute the slot again.
            node = cluster.nodes_manager.get_node_from_slot(slot)
            pipeline.execute_command(command, *part, target_nodes=[node])
        return list(zip(slots.values(), await self._execute(pipeline), strict=True))

    async def _execute(self, pipeline: Any) -> list[Any]:
        """Return the results of a pipeline's commands, or their exceptions."""
        results = list(await pipeline.execute(raise_on_error=False))
        if not isinstance(self._client, RedisCluster):
            return results
        # redis-py raises AttributeError for a redirection to a node that joined after redis-py last
        # asked for the nodes.
        moved = [i for i, result in enumerate(results) if isinstance(result, AttributeError)]
        if moved:
            await self._client.nodes_manager.initialize()
        for i in moved:
            results[i] = RedisClusterException("a slot is moving to a node that was not known")
        return results

    async def scan(self, pattern: bytes) -> AsyncIterator[list[bytes]]:
        """Yield all keys that match a glob, in lists; some keys may come twice."""
        keys = []
        async for key in self._client.scan_iter(match=pattern, count=_SCAN_COUNT):
            keys.append(key)
            if len(keys) == _SCAN_COUNT:
                yield keys
                keys = []
        if keys:
            yield keys

    async def unlink(self, keys: list[bytes]) -> int:
        """Delete keys; return how many of them existed."""
        if not keys:
            return 0
        if not isinstance(self._client, RedisCluster):
            return int(await self._client.unlink(*keys))
        results = [result for _, result in await self._each_slot(self._client, "UNLINK", keys)]
        for result in results:
            if isinstance(result, Exception):
                raise result
        return sum(results)

    async def aclose(self) -> None:
        """Close all connections, even if one fails to close; then raise the first failure."""
        # For a cluster, both names stand for the same client.
        await close(*{self._client, self._lookups})
