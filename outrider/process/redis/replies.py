"""Bounds the replies of a Redis, so that a hostile Redis cannot stop its client."""

from __future__ import annotations

import re
from typing import Any

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.connection import DefaultParser
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import InvalidResponse

# The longest valid reply answers a lookup for some thousand sequences.
_MAX_REPLY_BYTES = 16 * 2**20
# The head of a list of a million elements or more. A value holds token ids of 4 bytes, and cannot
# contain such a head: four ASCII digits would be a token id beyond every vocabulary.
_VAST_LIST = re.compile(rb"[*%~>|]\d{7}")
_HEAD_BYTES = 8


class BoundedParser(DefaultParser):  # type: ignore[misc, valid-type]  # chosen at import
    """Parses replies as redis-py does, but raises InvalidResponse for a reply that is too large.

    Neither redis-py nor hiredis has a setting that bounds a reply's size. hiredis bounds only the
    nesting. As soon as hiredis has read a list's head of a dozen bytes, it allocates 8 bytes for
    each element of the list. A hostile Redis could stop a drafter with a list of a thousand million
    elements: nothing else runs during the seconds in which Python frees the list. redis-py also has
    a parser written in Python, but that parser is private too, and reads a value of any size. This
    class overrides the methods in which redis-py's parser reads its stream. The test
    tests/ngram/test_lying_redis.py fails if these methods change, or if hiredis gets a bound of its
    own.
    """

    __slots__ = ("_byte_count", "_tail")

    def __init__(self, socket_read_size: int) -> None:
        super().__init__(socket_read_size)
        self._byte_count = 0
        self._tail = b""

    async def read_response(
        self, disable_decoding: bool = False, push_request: bool = False
    ) -> Any:
        """Read one reply, as the base class does."""
        self._byte_count = 0
        self._tail = b""
        return await super().read_response(
            disable_decoding=disable_decoding, push_request=push_request
        )

    async def read_from_socket(self) -> bool:
        """Check the bytes that arrived, then feed them to hiredis as the base class does."""
        stream: Any = self._stream
        data = await stream.read(self._read_size)
        if not data:
            raise RedisConnectionError("Redis hung up")
        self._byte_count += len(data)
        if self._byte_count > _MAX_REPLY_BYTES:
            raise InvalidResponse(f"a reply has more than {_MAX_REPLY_BYTES} bytes")
        if _VAST_LIST.search(self._tail + data):
            raise InvalidResponse("a reply is a list of a million elements or more")
        self._tail = (self._tail + data)[-_HEAD_BYTES:]
        reader: Any = self._reader
        reader.feed(data)
        return True


def bound_replies(client: Redis | RedisCluster) -> None:
    """Make all connections of a client parse replies with the bounded parser."""
    if isinstance(client, RedisCluster):
        nodes = client.nodes_manager
        startup = [node.connection_kwargs for node in nodes.startup_nodes.values()]
        all_kwargs = [nodes.connection_kwargs, *startup]
    else:
        all_kwargs = [client.connection_pool.connection_kwargs]
    for kwargs in all_kwargs:
        kwargs["parser_class"] = BoundedParser
