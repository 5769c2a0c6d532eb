"""A shaped link in its own process, seen from both of its ends."""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import pytest_asyncio

from outrider.process.network.ports import free_port
from outrider_bench.experiment.child import Launch, start
from outrider_bench.experiment.link_process import LinkControl
from outrider_bench.experiment.links import SEGMENT_BYTES, ShapedLink, _End
from outrider_bench.experiment.spec import Link
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

_HOST = "127.0.0.1"
TRIES = 8
"""Other processes delay a link at times. A link that is itself too slow is slow in every try."""


@dataclass
class Rig:
    """A link before an echo server."""

    control: LinkControl
    port: int

    async def shape(self, **settings: float) -> None:
        await self.control.shape(Link.model_validate(settings))

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return a connection whose handshake has ended, since some bytes have come through it."""
        reader, writer = await asyncio.open_connection(_HOST, self.port)
        writer.write(b"!")
        await reader.readexactly(1)
        return reader, writer


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass  # some tests reset the connection
    writer.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def link() -> AsyncIterator[Rig]:
    server = await asyncio.start_server(_echo, _HOST, 0)
    target = server.sockets[0].getsockname()[1]
    port, control_port = free_port(_HOST), free_port(_HOST)
    forward = f"{_HOST}:{port}={_HOST}:{target}"
    arguments = ("--control", f"{_HOST}:{control_port}", "--forward", forward)
    launch = Launch("link", "outrider_bench.experiment.link_process", arguments)
    handle = await start(launch)
    control = LinkControl(_HOST, control_port)

    async def is_up() -> bool:
        try:
            await control.traffic()
        except ConnectionError:
            assert await handle.alive(), await handle.tail()
            return False
        return True

    try:
        await until(is_up)
        yield Rig(control, port)
    finally:
        await handle.stop()
        server.close()
        await asyncio.sleep(0.05)  # then each `_echo` has seen the end of its connection


@pytest_asyncio.fixture(loop_scope="module")
async def rig(link: Rig) -> Rig:
    """Return the link of all tests, which delays and drops nothing until a test shapes it."""
    await link.shape()
    return link


async def _round_trips_ms(rig: Rig, count: int) -> list[float]:
    reader, writer = await rig.connect()
    found = []
    for _ in range(count):
        started = time.perf_counter()
        writer.write(b"x" * 100)
        await reader.readexactly(100)
        found.append(1000 * (time.perf_counter() - started))
    writer.close()
    return found


async def test_a_link_lengthens_round_trips_to_within_a_millisecond(rig: Rig) -> None:
    """The shortest trip is compared: other processes delay a link at times."""
    bare = min(await _round_trips_ms(rig, 50))
    for added in (1.0, 5.0, 20.0):
        await rig.shape(round_trip_ms=added)
        for _ in range(TRIES):
            found = min(await _round_trips_ms(rig, 20))
            assert added <= found
            if found < added + bare + 1.0:
                break
        else:
            pytest.fail(f"with {added} ms more, the shortest round trip takes {found} ms")


async def test_bytes_arrive_by_the_bandwidth_one_behind_the_other() -> None:
    link = ShapedLink(Link(mbit_s=40.0, round_trip_ms=10.0))
    sent = b"x" * 1_000_000
    # Both connections send all their bytes at 5 s, and share the wire.
    first = list(link.schedule(link.up, sent, 5.0, 0.0))
    second = list(link.schedule(link.up, sent, 5.0, 0.0))
    assert b"".join(piece for _, piece in first) == sent
    assert first[0][0] == pytest.approx(5.005 + SEGMENT_BYTES * 8 / 40e6)
    assert first[-1][0] == pytest.approx(5.205)
    assert second[-1][0] == pytest.approx(5.405)
    other_direction = list(link.schedule(link.down, sent, 5.0, 0.0))
    assert other_direction[-1][0] == pytest.approx(5.205)


async def test_jitter_and_loss_keep_the_order_of_bytes_and_lose_none(rig: Rig) -> None:
    reader, writer = await rig.connect()
    await rig.shape(round_trip_ms=2, jitter_ms=5, loss=0.05, retransmit_ms=10)
    sent = b"".join(i.to_bytes(4, "big") for i in range(50_000))
    for place in range(0, len(sent), 1_000):
        writer.write(sent[place : place + 1_000])
        await asyncio.sleep(0)
    assert await reader.readexactly(len(sent)) == sent
    assert (await rig.control.traffic()).lost_segment_count > 0
    writer.close()


async def test_a_lost_segment_comes_a_retransmission_later(rig: Rig) -> None:
    reader, writer = await rig.connect()
    await rig.shape(loss=0.999, retransmit_ms=50)
    started = time.perf_counter()
    writer.write(b"x")
    await reader.readexactly(1)
    assert time.perf_counter() - started > 0.099  # lost once in each direction
    writer.close()


async def test_an_outage_holds_all_bytes_and_loses_none(rig: Rig) -> None:
    reader, writer = await rig.connect()
    await rig.control.outage(0.4)
    started = time.perf_counter()
    writer.write(b"a" * 10_000)
    await asyncio.sleep(0.2)
    writer.write(b"b" * 10_000)
    assert await reader.readexactly(20_000) == b"a" * 10_000 + b"b" * 10_000
    assert time.perf_counter() - started > 0.35
    writer.close()


async def test_an_outage_of_one_direction_leaves_the_other_alone() -> None:
    arrived: asyncio.Queue[bytes] = asyncio.Queue()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1):
            arrived.put_nowait(data)
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(connected, _HOST, 0)
    link = ShapedLink(Link())
    here = (_HOST, free_port(_HOST))
    async with link.forward(here, server.sockets[0].getsockname()):
        reader, writer = await asyncio.open_connection(*here)
        writer.write(b"1")
        assert await reader.readexactly(1) == await arrived.get()
        link.outage(60, "down")
        writer.write(b"2")
        assert await asyncio.wait_for(arrived.get(), 10) == b"2"
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.readexactly(1), 0.1)
        writer.close()
    server.close()


async def test_a_connection_that_ended_in_both_directions_is_closed() -> None:
    server = await asyncio.start_server(_echo, _HOST, 0)
    link = ShapedLink(Link())
    here = (_HOST, free_port(_HOST))
    async with link.forward(here, server.sockets[0].getsockname()):
        reader, writer = await asyncio.open_connection(*here)
        writer.write(b"x")
        writer.write_eof()
        assert await reader.read() == b"x"

        async def is_closed() -> bool:
            return not link._ends

        await until(is_closed)
        writer.close()
    server.close()


async def test_a_vanished_connection_stays_open_and_new_ones_pass(rig: Rig) -> None:
    reader, writer = await rig.connect()
    await rig.control.vanish()
    writer.write(b"lost")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reader.read(1), 0.1)
    writer.close()
    assert len(await _round_trips_ms(rig, 1)) == 1


async def test_a_reset_cuts_both_sides_and_new_connections_pass(rig: Rig) -> None:
    before = await rig.control.traffic()
    reader, writer = await rig.connect()
    await rig.control.reset()
    with pytest.raises(ConnectionResetError):
        await reader.readexactly(1)
    writer.close()
    assert len(await _round_trips_ms(rig, 1)) == 1
    assert (await rig.control.traffic()).connection_count == before.connection_count + 2


async def test_bytes_are_counted_in_each_direction(rig: Rig) -> None:
    reader, writer = await rig.connect()
    before = await rig.control.traffic()
    writer.write(b"x" * 12_345)
    await reader.readexactly(12_345)
    after = await rig.control.traffic()
    assert after.up_bytes - before.up_bytes == 12_345
    assert after.down_bytes - before.down_bytes == 12_345
    writer.close()


async def test_an_end_of_stream_meets_a_connection_that_was_reset() -> None:
    loop = asyncio.get_running_loop()
    link = ShapedLink(Link())
    with socket.create_server((_HOST, 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
    await loop.create_connection(lambda: _End(link, None), sock=accepted)
    [end] = link._ends
    # Closing sends RST. When `_take` gets the end of the stream, the loop has not seen the RST yet.
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
    end._take(b"")
    async with asyncio.timeout(10):
        # The loop tells nobody that it has closed a transport.
        while link._ends:  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_a_shape_out_of_range_is_refused_by_its_field(rig: Rig) -> None:
    with pytest.raises(ValueError, match="round_trip_ms"):
        await rig.control._ask({"shape": {"round_trip_ms": -1}})
