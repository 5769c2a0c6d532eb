"""One Redis of any topology, behind a few calls that are the same for one server, for Sentinel's and for a cluster.

redis-py's clients do the work: they find a service's master and a cluster's slots, and follow when these move. Nothing here waits
longer than a socket's timeout; a command whose time is up takes its connection with it, so that no other gets its reply.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from typing import Any

from hiredis import pack_command
from redis._parsers import _AsyncHiredisParser
from redis.asyncio import Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.connection import AbstractConnection, ConnectionPool
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import InvalidResponse, RedisClusterException, RedisError

from drafter_svc.pools.redis_server import RedisServer

# Everything by which a lost, slow or refusing Redis makes itself felt.
FAILURES = (RedisError, RedisClusterException, OSError)

_SOCKET_TIMEOUT_S = 2.0
_SCAN_COUNT = 1000
# The longest honest reply is that to a lookup for some thousand sequences.
_MOST_REPLY_BYTES = 16 * 2**20
# The head of a list of a million elements or more. A value cannot look like it, since no token id is as large as four digits.
_VAST_LIST = re.compile(rb"[*%~>|]\d{7}")
_HEAD_BYTES = 8


class BoundedParser(_AsyncHiredisParser):
    """redis-py's reader of replies, which raises InvalidResponse for one that is too large to be true.

    hiredis has no bounds of its own but that on nesting. It makes room for a list as soon as it has read its head, and takes
    seconds, in which nothing else runs, to free one of a thousand million elements.
    """

    __slots__ = ("_byte_count", "_tail")

    def __init__(self, socket_read_size: int) -> None:
        super().__init__(socket_read_size)
        self._byte_count = 0
        self._tail = b""

    async def read_response(
        self, disable_decoding: bool = False, push_request: bool = False
    ) -> Any:
        self._byte_count, self._tail = 0, b""
        return await super().read_response(
            disable_decoding=disable_decoding, push_request=push_request
        )

    async def read_from_socket(self) -> bool:
        """Feed hiredis with what has come, as the class above does, once that was looked at."""
        stream: Any = self._stream
        data = await stream.read(self._read_size)
        if not data:
            raise RedisConnectionError("Redis hung up")
        self._byte_count += len(data)
        if self._byte_count > _MOST_REPLY_BYTES:
            raise InvalidResponse(f"a reply has more than {_MOST_REPLY_BYTES} bytes")
        if _VAST_LIST.search(self._tail + data):
            raise InvalidResponse("a reply is a list of a million elements or more")
        self._tail = data[-_HEAD_BYTES:]
        reader: Any = self._reader
        reader.feed(data)
        return True


class RedisClient:
    """Connects when first asked. All calls raise what is in FAILURES; made and used on a running event loop."""

    def __init__(self, server: RedisServer) -> None:
        # RESP2 and no driver_info: a connection then begins with AUTH and SELECT alone, which need no permissions of their own.
        common: dict[str, Any] = {
            "protocol": 2,
            "driver_info": None,
            "socket_timeout": _SOCKET_TIMEOUT_S,
            "socket_connect_timeout": _SOCKET_TIMEOUT_S,
            # Once more on a new connection, for the one that was kept may be to a server that is gone.
            "retry": Retry(NoBackoff(), 1),
        }
        self._sentinel: Sentinel | None = None
        # Lookups have connections of their own, whose commands `_ask` gives their time: with a socket's timeout and a Python before
        # 3.12, redis-py makes a task for each command that it sends, a third of what it takes for a lookup.
        self._client: Redis | RedisCluster
        self._lookups: Redis | RedisCluster
        if server.topology == "cluster":
            nodes = [ClusterNode(host, port) for host, port in server.addresses]
            # The addresses given stay those that are asked for the slots, as they may be names that move to other hosts.
            self._client = RedisCluster(
                startup_nodes=nodes, dynamic_startup_nodes=False, **common, **server.options
            )
            self._lookups = self._client
            manager = self._client.nodes_manager
            for kwargs in (
                manager.connection_kwargs,
                *(node.connection_kwargs for node in manager.startup_nodes.values()),
            ):
                kwargs["parser_class"] = BoundedParser
        elif server.topology == "sentinel":
            options = {
                name: value
                for name, value in server.options.items()
                if server.sentinel_auth or name != "credential_provider"
            }
            self._sentinel = Sentinel(server.addresses, sentinel_kwargs=common | options)  # type: ignore[no-untyped-call]  # it has no types
            master = {
                "service_name": server.service,
                "db": server.database,
                **common,
                **server.options,
            }
            self._client = self._sentinel.master_for(**master)
            self._lookups = self._sentinel.master_for(**master | {"socket_timeout": None})
        else:
            [(host, port)] = server.addresses
            alone = {"host": host, "port": port, "db": server.database, **common, **server.options}
            self._client = Redis(**alone)
            self._lookups = Redis(**alone | {"socket_timeout": None})
        for client in (self._client, self._lookups):
            if not isinstance(client, RedisCluster):
                client.connection_pool.connection_kwargs["parser_class"] = BoundedParser

    async def mget(self, keys: list[bytes]) -> list[Any]:
        """Values in the keys' order, by one command, or in a cluster by one for each slot.

        None stands for what is not there, and for what is in a slot that cannot be asked while others can.
        """
        if not isinstance(self._lookups, RedisCluster):
            command = pack_command(("MGET", *keys))  # type: ignore[arg-type]  # its types have it that commands are of one word
            return list(await self._ask(self._lookups.connection_pool, command))
        parts = await self._each_slot(self._lookups, "MGET", keys)
        values: dict[bytes, Any] = {}
        for part, result in parts:
            if not isinstance(result, Exception):
                values.update(zip(part, result, strict=True))
        if not values:
            raise parts[0][1]
        return [values.get(key) for key in keys]

    async def _ask(self, connections: ConnectionPool, command: bytes) -> Any:
        """The reply to a packed command, as the client's execute_command gets it, which packs in Python at twice the cost."""

        async def exchange() -> Any:
            await connection.send_packed_command(command)
            return await connection.read_response()

        try:
            async with asyncio.timeout(_SOCKET_TIMEOUT_S):
                connection: AbstractConnection = await connections.get_connection()  # type: ignore[no-untyped-call]  # it has no types
                try:
                    return await connection.retry.call_with_retry(
                        exchange, lambda error: connection.disconnect()
                    )
                finally:
                    await connections.release(connection)
        except TimeoutError as cause:
            raise TimeoutError(f"no answer in {_SOCKET_TIMEOUT_S} s") from cause

    async def run(self, script: str, calls: Sequence[tuple[list[bytes], list[Any]]]) -> list[Any]:
        """Run a script for each (keys, arguments), in one round trip to each server; a call that failed yields its exception."""
        pipeline: Any = self._client.pipeline(transaction=False)
        for keys, arguments in calls:
            # By its text, not its digest: it is small, and there is no server that could have forgotten it.
            pipeline.eval(script, len(keys), *keys, *arguments)
        return await self._execute(pipeline)

    async def _each_slot(
        self, cluster: RedisCluster, command: str, keys: list[bytes]
    ) -> list[tuple[list[bytes], Any]]:
        """A command of many keys, for each slot's by itself, to all servers at once; keys with their result, or an exception."""
        slots: dict[int, list[bytes]] = {}
        for key in keys:
            slots.setdefault(cluster.keyslot(key), []).append(key)
        await cluster.initialize()
        pipeline: Any = cluster.pipeline()
        for slot, part in slots.items():
            # Told the node, it does not work the slot out once more.
            pipeline.execute_command(
                command, *part, target_nodes=[cluster.nodes_manager.get_node_from_slot(slot)]
            )
        return list(zip(slots.values(), await self._execute(pipeline), strict=True))

    async def _execute(self, pipeline: Any) -> list[Any]:
        results = list(await pipeline.execute(raise_on_error=False))
        if isinstance(self._client, RedisCluster) and any(
            isinstance(result, AttributeError) for result in results
        ):
            # What redis-py stumbles with over a redirection to a node that joined after it last asked who there is.
            await self._client.nodes_manager.initialize()
            unknown = RedisClusterException("a slot is moving to a node that was not known")
            results = [
                unknown if isinstance(result, AttributeError) else result for result in results
            ]
        return results

    async def scan(self, pattern: bytes) -> AsyncIterator[list[bytes]]:
        """All keys that match, in parts; some may come twice."""
        keys = []
        async for key in self._client.scan_iter(match=pattern, count=_SCAN_COUNT):
            keys.append(key)
            if len(keys) == _SCAN_COUNT:
                yield keys
                keys = []
        if keys:
            yield keys

    async def unlink(self, keys: list[bytes]) -> int:
        """Delete keys; how many there were."""
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
        """Hang up."""
        await self._client.aclose()
        await self._lookups.aclose()
        if isinstance(self._client, RedisCluster):
            # After a failure the client takes itself for closed, while its connections are not.
            await self._client.nodes_manager.aclose()
            await self._client.nodes_manager.aclose("startup_nodes")
        if self._sentinel is not None:
            for sentinel in self._sentinel.sentinels:
                await sentinel.aclose()
