"""Headers of HTTP requests are bounded, and silent or slow connections are closed."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import pytest
import pytest_asyncio

from gateway.http.ingress import connections
from gateway.http.ingress.connections import MAX_HEADER_BYTES, MAX_HEADERS, BoundedProtocol
from gateway.metrics import GatewayMetrics
from gateway.server import Gateway, running
from tests.gateway.gateway_rig import settings
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="session")

# A test fails if a connection stays open longer than this.
PATIENCE_S = 20.0
HEAD = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def gateway() -> AsyncIterator[Gateway]:
    """Yield a gateway without a verifier, and with short timeouts."""
    chosen = settings("127.0.0.1:9", drain_seconds=0, keep_alive_seconds=1.2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BoundedProtocol, "header_seconds", 0.3)
        patch.setattr(BoundedProtocol, "body_seconds", 0.3)
        async with running(chosen, GatewayMetrics()) as gateway:
            yield gateway


class Connection:
    """A raw connection to the gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._where = urlsplit(gateway.http_url)

    async def __aenter__(self) -> Connection:
        self.reader, self._writer = await asyncio.open_connection(
            self._where.hostname, self._where.port
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()

    async def send(self, data: bytes) -> None:
        """Send data. The gateway may have closed the connection."""
        try:
            self._writer.write(data)
            await self._writer.drain()
        except ConnectionError:
            pass

    async def to_the_end(self) -> bytes:
        """Return everything that the gateway sends, until it closes the connection."""
        async with asyncio.timeout(PATIENCE_S):
            try:
                return await self.reader.read()
            except ConnectionResetError:
                return b""


def answer_of(received: bytes) -> tuple[int, dict[str, Any]]:
    head, _, body = received.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


@pytest.mark.parametrize(
    "headers",
    [
        b"X: " + b"a" * MAX_HEADER_BYTES + b"\r\n\r\n",
        b"X: a\r\n" * (MAX_HEADERS + 1) + b"\r\n",
    ],
    ids=["one long value", "one too many"],
)
async def test_headers_above_the_bound_are_refused(gateway: Gateway, headers: bytes) -> None:
    async with Connection(gateway) as connection:
        await connection.send(HEAD + headers)
        status, error = answer_of(await connection.to_the_end())
    assert (status, error["code"]) == (431, "headers_too_large")
    assert str(MAX_HEADER_BYTES) in error["message"]


async def test_a_long_path_counts_as_a_header(gateway: Gateway) -> None:
    async with Connection(gateway) as connection:
        await connection.send(
            b"GET /" + b"a" * MAX_HEADER_BYTES + b" HTTP/1.1\r\nHost: localhost\r\n\r\n"
        )
        assert answer_of(await connection.to_the_end())[0] == 431


async def test_a_header_that_never_ends_is_refused_at_the_bound(
    gateway: Gateway,
) -> None:
    """The gateway stops reading at the bound, however many bytes the client sends."""
    async with Connection(gateway) as connection:
        await connection.send(HEAD + b"X: ")
        sent = asyncio.create_task(connection.send(b"a" * 64 * 2**20))
        received = await connection.to_the_end()
        sent.cancel()
    assert received == b"" or answer_of(received)[0] == 431


async def test_a_trailer_is_bounded_as_headers_are(gateway: Gateway) -> None:
    async with Connection(gateway) as connection:
        await connection.send(POST + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n")
        await connection.send(b"X: " + b"a" * 8 * 2**20)
        received = await connection.to_the_end()
    assert received == b"" or answer_of(received)[0] == 431


async def test_as_many_headers_as_allowed_are_accepted(gateway: Gateway) -> None:
    filling = b"".join(b"X-%d: %s\r\n" % (number, b"a" * 400) for number in range(MAX_HEADERS - 2))
    async with Connection(gateway) as connection:
        await connection.send(HEAD + filling + b"Connection: close\r\n\r\n")
        assert (await connection.to_the_end()).startswith(b"HTTP/1.1 200")


async def test_a_connection_without_a_request_is_closed(gateway: Gateway) -> None:
    async with Connection(gateway) as connection:
        assert await connection.to_the_end() == b""


async def test_an_idle_connection_is_closed_after_its_answer(gateway: Gateway) -> None:
    async with Connection(gateway) as connection:
        await connection.send(HEAD + b"\r\n")
        received = await connection.to_the_end()
    assert received.startswith(b"HTTP/1.1 200")
    assert b"connection: close" not in received
    # The header's time is rounded down to seconds, so that no client writes to a closed connection.
    assert b"\r\nkeep-alive: timeout=1\r\n" in received


async def test_a_further_idle_connection_closes_the_one_that_was_idle_for_longest(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MAX_IDLE", 2)

    async def ask(connection: Connection) -> None:
        await connection.send(HEAD + b"\r\n")
        await connection.reader.readuntil(b"}")

    async with (
        Connection(gateway) as first,
        Connection(gateway) as second,
        Connection(gateway) as third,
    ):
        for connection in (first, second, first, third):
            await ask(connection)
        assert await second.to_the_end() == b""
        await ask(first)


@pytest.mark.parametrize(
    ("beginning", "after_a_request"),
    [
        (HEAD, True),
        (b"\r\n", False),
        (POST + b"Content-Length: 9\r\n\r\n", True),
        (POST + b"Content-Length: 9\r\n\r\n{", False),
    ],
)
async def test_half_a_request_times_out(
    gateway: Gateway, beginning: bytes, after_a_request: bool
) -> None:
    async with Connection(gateway) as connection:
        if after_a_request:
            await connection.send(HEAD + b"\r\n")
            await connection.reader.readuntil(b"}")
        await connection.send(beginning)
        received = await connection.to_the_end()
    status, error = answer_of(received)
    assert (status, error["code"]) == (408, "request_timeout")


async def test_a_request_that_arrives_too_slowly_times_out(gateway: Gateway) -> None:
    async with Connection(gateway) as connection:
        ended = asyncio.create_task(connection.to_the_end())
        while not ended.done():
            await connection.send(b"\r\n")
            await asyncio.sleep(0.05)
        assert answer_of(await ended)[0] == 408


@pytest.mark.parametrize(
    "sent",
    [b"\x16\x03\x01 hello\r\n\r\n", HEAD + b"Host: localhost\r\nConnection: close\r\n\r\n"],
    ids=["no HTTP", "two hosts"],
)
async def test_a_malformed_request_gets_an_error_in_openais_shape(
    gateway: Gateway, sent: bytes
) -> None:
    async with Connection(gateway) as connection:
        await connection.send(sent)
        status, error = answer_of(await connection.to_the_end())
    assert (status, error["code"]) == (400, "malformed_request")


async def test_a_slow_answer_does_not_time_out(gateway: Gateway) -> None:
    """The page's events go on for longer than a request may take to arrive."""
    async with Connection(gateway) as connection:
        await connection.send(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        async with asyncio.timeout(PATIENCE_S):
            for _ in range(3):
                await connection.reader.readuntil(b"data: ")


async def test_a_connection_whose_last_bytes_are_never_read_ends(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The unread bytes are too few to pause the answer."""
    monkeypatch.setattr(BoundedProtocol, "unread_seconds", 0.5)
    where = urlsplit(gateway.http_url)
    state = gateway._http.server_state
    connections = state.connections
    await until(lambda: not connections)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2304)
        client.connect((where.hostname, where.port))
        await until(lambda: len(connections) == 1)
        [connection] = connections
        async with asyncio.timeout(PATIENCE_S):
            while connection.transport.get_write_buffer_size() == 0:
                count = state.total_requests
                client.sendall(HEAD + b"\r\n")
                while state.total_requests == count:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
        await until(lambda: not connections)
