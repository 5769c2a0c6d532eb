"""A server that sends bad replies over a real connection costs no more than the lookup."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from redis.asyncio import RedisCluster
from redis.exceptions import InvalidResponse

from drafter_svc.pools import redis_client
from outrider.process.redis import replies as redis_replies
from outrider.process.redis.server import RedisServer
from tests.ngram.pools import found, pool, written
from tests.redis_servers import Standalone


class Liar:
    """Answers the first command with `pieces`, and then, if `endless`, with zeros for ever."""

    def __init__(self, pieces: list[bytes], endless: bool = False) -> None:
        self.pieces = pieces
        self.endless = endless
        self.sent_bytes = 0
        self.port = 0
        self.hung_up = asyncio.Event()

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.read(65_536)
            for piece in self.pieces:
                writer.write(piece)
                await writer.drain()
                self.sent_bytes += len(piece)
                # Let the client read each piece by itself.
                await asyncio.sleep(0.01)
            while self.endless:
                writer.write(bytes(65_536))
                await writer.drain()
                self.sent_bytes += 65_536
            await reader.read(1)
        # The pool has closed the connection.
        except ConnectionError:
            pass
        finally:
            self.hung_up.set()
            writer.close()


@asynccontextmanager
async def lying(liar: Liar) -> AsyncIterator[RedisServer]:
    server = await asyncio.start_server(liar.connected, "127.0.0.1", 0)
    try:
        port = server.sockets[0].getsockname()[1]
        yield RedisServer.parse(f"redis://127.0.0.1:{port}")
    finally:
        server.close()


LIES = {
    "a list of a thousand million": Liar([b"*1048576000\r\n"]),
    "such a list in two pieces": Liar([b"*10485", b"76000\r\n"]),
    "such a list byte by byte": Liar([bytes([byte]) for byte in b"*1048576000\r\n"]),
    "such a list in a list": Liar([b"*1\r\n*1048576000\r\n"]),
    "a value without an end": Liar([b"*1\r\n$536870911\r\n"], endless=True),
    "lists in lists in lists": Liar([b"*1\r\n" * 100_000]),
    "no reply at all": Liar([b"hello\r\n"]),
}


@pytest.mark.parametrize("name", LIES)
async def test_an_oversized_or_garbled_reply_is_a_failed_lookup(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    liar = Liar(LIES[name].pieces, LIES[name].endless)
    async with lying(liar) as server, pool(server) as made:
        assert await found(made, [[1]]) == [[]]
        assert made.counters.failed == 1
        assert made.counters.late == 0
        # The pool does not read the rest of the reply, and does not send another command at once.
        await asyncio.wait_for(liar.hung_up.wait(), 30)
        assert liar.sent_bytes < 4 * redis_replies._MAX_REPLY_BYTES
        assert await found(made, [[1]]) == [[]]
        assert made.counters.skipped == 1
    assert "Redis fails (lookups" in caplog.text


async def test_a_string_where_a_list_must_be_is_refused_before_it_becomes_one() -> None:
    size = 8 * 2**20
    liar = Liar([b"$%d\r\n" % size, bytes(size), b"\r\n"])
    async with lying(liar) as server:
        client = redis_client.RedisClient(server)
        with pytest.raises(InvalidResponse, match="no list"):
            await client.newest(b"index", 1, 1)
        with pytest.raises(InvalidResponse, match="no list"):
            await client.mget([b"key"])
        await client.aclose()


@pytest.mark.parametrize("is_cluster", [False, True])
async def test_replies_are_bounded_on_a_server_and_in_a_cluster(is_cluster: bool) -> None:
    client = redis_client.RedisClient(
        RedisServer.parse("redis://127.0.0.1:1", is_cluster=is_cluster)
    )
    for made in (client._client, client._lookups):
        if isinstance(made, RedisCluster):
            nodes = made.nodes_manager
            settings = [
                nodes.connection_kwargs,
                *(node.connection_kwargs for node in nodes.startup_nodes.values()),
            ]
        else:
            settings = [made.connection_pool.connection_kwargs]
        assert {one["parser_class"] for one in settings} == {redis_replies.BoundedParser}
    await client.aclose()


async def test_the_longest_valid_reply_is_accepted(redis_server: Standalone) -> None:
    """Continuations of 64 tokens, for three n-grams of each of 4096 sequences, take 3.3 MB."""
    async with pool(redis_server.server) as made:
        longest = list(range(4032, 4096))
        await written(made, *(([i], longest) for i in range(1000)))
        queries = [[[5, 6, i % 1000], [6, i % 1000], [i % 1000]] for i in range(4096)]
        assert await found(made, *queries) == [longest] * 4096
        assert made.counters.failed == 0
