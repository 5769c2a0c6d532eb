"""A proxy that shapes TCP connections: round trip, jitter, bandwidth, loss, outages and resets.

The proxy handles bytes and times, and knows no protocol. It needs an event loop with exact timers:
see `exact_loop`.
"""

from __future__ import annotations

import asyncio
import random
import selectors
import socket
import struct
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal

from outrider_bench.experiment.records import LinkTraffic
from outrider_bench.experiment.spec import Link

SEGMENT_BYTES = 1_460
"""The payload of a TCP segment over Ethernet."""

Direction = Literal["up", "down", "both"]
"""Up is from the side that dials to the side that listens."""

_LEAST_QUEUE_BYTES = 1 << 20
_LINGER = struct.pack("ii", 1, 0)


def exact_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop with exact timers; epoll and libuv round timers to milliseconds."""
    return asyncio.SelectorEventLoop(selectors.SelectSelector())


@dataclass(slots=True)
class _Wire:
    """One direction of a link. All connections share it."""

    free_at: float = 0.0
    byte_count: int = 0
    held_until: float = 0.0
    """The loop's time at which an outage ends."""
    recordings: list[bytearray] = field(default_factory=list)
    """For each connection, the bytes that its sender has sent, if the link records."""


@dataclass(eq=False)
class ShapedLink:
    """A link in both directions.

    The link's shape may be changed while the link runs. Bytes in transit keep the shape with which
    they left.
    """

    shape: Link
    seed: int = 0
    records: bool = False
    """True if `up` and `down` keep all bytes."""
    connection_count: int = 0
    lost_segment_count: int = 0

    def __post_init__(self) -> None:
        self.up = _Wire()
        self.down = _Wire()
        self._random = random.Random(self.seed)
        self._ends: set[_End] = set()

    def change(self, shape: Link) -> None:
        """Set the shape for bytes that come from now on."""
        self.shape = shape
        self.up.free_at = self.down.free_at = 0.0

    def outage(self, seconds: float, direction: Direction = "both") -> None:
        """Hold back a direction's bytes, and new connections, for some seconds; lose nothing."""
        ends_at = asyncio.get_running_loop().time() + seconds
        if direction != "down":
            self.up.held_until = ends_at
        if direction != "up":
            self.down.held_until = ends_at

    @property
    def held_until(self) -> float:
        """The loop's time until which no connection can be made."""
        return max(self.up.held_until, self.down.held_until)

    def vanish(self) -> None:
        """Lose all further bytes of the present connections, and leave them open.

        Each side loses the other without notice, as when a machine dies. New connections work.
        """
        for end in self._ends:
            end.vanish()

    def reset(self) -> None:
        """Cut all connections: both sides receive RST, as from a machine that was restarted."""
        for end in list(self._ends):
            end.reset()

    @property
    def traffic(self) -> LinkTraffic:
        """The bytes and connections since the start."""
        return LinkTraffic(
            self.up.byte_count, self.down.byte_count, self.connection_count, self.lost_segment_count
        )

    @property
    def round_trip_s(self) -> float:
        """The seconds that the link adds to a round trip, without jitter."""
        return self.shape.round_trip_ms / 1000

    @property
    def queue_bytes(self) -> int:
        """The number of bytes in transit above which the sender must wait, as with TCP's window.

        The limit is for each connection and direction.
        """
        product = self.shape.mbit_s * 125_000 * self.round_trip_s
        return max(_LEAST_QUEUE_BYTES, round(2 * product))

    @asynccontextmanager
    async def forward(self, listen: tuple[str, int], target: tuple[str, int]) -> AsyncIterator[int]:
        """Forward connections from `listen` to `target` until the context ends.

        Yields the port on which the link listens; for port 0 this is a free port. The method may be
        called for several ports.
        """
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: _End(self, target), *listen)
        port: int = server.sockets[0].getsockname()[1]
        try:
            yield port
        finally:
            server.close()
            self.reset()
            await asyncio.sleep(0)  # transports close in the loop's next turn

    def schedule(
        self, wire: _Wire, data: bytes, leaves: float, last: float
    ) -> Iterator[tuple[float, bytes]]:
        """Yield the pieces of `data` with the times at which they arrive.

        The data leaves at `leaves`. No piece arrives before `last`, when the previous one arrives.
        """
        shape = self.shape
        rate = shape.mbit_s * 125_000
        jitter_s = self._random.uniform(0.0, shape.jitter_ms / 1000)
        size = len(data)
        if rate or shape.loss:
            size = SEGMENT_BYTES
        for start in range(0, len(data), size):
            piece = data[start : start + size]
            wire.free_at = max(wire.free_at, leaves)
            if rate:
                wire.free_at += len(piece) / rate
            at = wire.free_at + self.round_trip_s / 2 + jitter_s
            if shape.loss and self._random.random() < shape.loss:
                self.lost_segment_count += 1
                at += max(shape.retransmit_ms / 1000, self.round_trip_s)
            last = max(last, at)
            yield last, piece


@dataclass(eq=False)
class _End(asyncio.Protocol):
    """One end of a connection. Received bytes wait here until they are due at the other end.

    An accepted end dials its target, and so makes the other end.
    """

    link: ShapedLink
    target: tuple[str, int] | None
    peer: _End | None = None
    opens_at: float = 0.0
    """The time at which the handshake is over. Nothing leaves earlier."""
    is_full: bool = False
    """True if this end's socket takes no more bytes for now."""
    has_ended: bool = False
    """True if the program at this end sends no more."""
    has_vanished: bool = False
    queue: deque[tuple[float, bytes | None]] = field(default_factory=deque)
    """Due times with bytes; b"" is the end of the stream, None the end of the connection."""

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._dialling: asyncio.Task[None] | None = None
        self._waiting_bytes = 0
        self._last = 0.0
        self._recording = bytearray()
        self._wire = self.link.down
        if self.target is not None:
            self._wire = self.link.up

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport; the side that dials may send after one round trip."""
        # create_server and create_connection make only transports of this type.
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.link._ends.add(self)
        if self.link.records:
            self._wire.recordings.append(self._recording)
        if self.target is not None:
            self.link.connection_count += 1
            self.opens_at = max(self._loop.time(), self.link.held_until) + self.link.round_trip_s
            self._dialling = asyncio.create_task(self._dial(*self.target))

    async def _dial(self, host: str, port: int) -> None:
        """Connect to the target when the handshake reaches it; a refusal becomes RST."""
        await asyncio.sleep(self.opens_at - self.link.round_trip_s / 2 - self._loop.time())
        # An outage may have started since the handshake started.
        await asyncio.sleep(self.link.held_until - self._loop.time())
        far = _End(self.link, None, peer=self)
        try:
            await self._loop.create_connection(lambda: far, host, port)
        except OSError:
            self.reset()
            return
        self.peer = far
        self._arm()

    def data_received(self, data: bytes) -> None:
        """Put the bytes on the wire; stop reading if more bytes wait than the link may hold."""
        if self.link.records:
            self._recording += data
        if self.has_vanished:
            return
        self._wire.byte_count += len(data)
        self._waiting_bytes += len(data)
        leaves = max(self._loop.time(), self.opens_at)
        self._put(*self.link.schedule(self._wire, data, leaves, self._last))
        if self._waiting_bytes > self.link.queue_bytes and self._transport is not None:
            self._transport.pause_reading()

    def eof_received(self) -> bool:
        """Pass on the end after the bytes that are under way; the other direction stays open."""
        self.has_ended = True
        self._put((self._in_order(), b""))
        return True  # the other direction stays open

    def connection_lost(self, exc: Exception | None) -> None:
        """Close the peer's connection after the bytes that are under way."""
        self.link._ends.discard(self)
        self._transport = None
        self._put((self._in_order(), None))

    def pause_writing(self) -> None:
        """Hold back bytes that arrive for this side: its reader does not keep up."""
        self.is_full = True

    def resume_writing(self) -> None:
        """Deliver the bytes that were held back."""
        self.is_full = False
        if self.peer is not None:
            self.peer._arm()

    def vanish(self) -> None:
        """Drop all held bytes, and pass on nothing more, not even the end of the connection."""
        self.has_vanished = True
        self.queue.clear()
        if self._timer is not None:
            self._timer.cancel()
        if self._dialling is not None:
            self._dialling.cancel()

    def reset(self) -> None:
        """Send RST, and drop all held bytes."""
        self.vanish()
        if self._transport is not None:
            connection = self._transport.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER)
            self._transport.abort()

    def _in_order(self) -> float:
        """Return the time at which the other end learns that a stream or connection ends now."""
        return max(self._last, self._loop.time() + self.link.round_trip_s / 2)

    def _put(self, *pieces: tuple[float, bytes | None]) -> None:
        if self.has_vanished:
            return
        for at, piece in pieces:
            self._last = at
            self.queue.append((at, piece))
        self._arm()

    def _arm(self) -> None:
        """Set the timer for the next piece, if there is one that the other end can take."""
        if self._timer is None and self.queue and self.peer is not None and not self.peer.is_full:
            due = max(self.queue[0][0], self._wire.held_until)
            self._timer = self._loop.call_at(due, self._deliver)

    def _deliver(self) -> None:
        """Pass all due pieces to the other end."""
        self._timer = None
        peer = self.peer
        while self.queue and peer is not None and not peer.is_full:
            due = max(self.queue[0][0], self._wire.held_until)
            if due > self._loop.time():
                break
            _, piece = self.queue.popleft()
            peer._take(piece)
            self._waiting_bytes -= len(piece or b"")
        if self._transport is not None and self._waiting_bytes <= self.link.queue_bytes // 2:
            self._transport.resume_reading()
        self._arm()

    def _take(self, piece: bytes | None) -> None:
        """Send a piece that came over the link."""
        if self._transport is None or self._transport.is_closing():
            return
        if piece is None or (not piece and self.has_ended):
            self._transport.close()
        elif piece:
            self._transport.write(piece)
        elif self._transport.can_write_eof():
            try:
                self._transport.write_eof()
            except OSError:
                # This side has hung up too, but the loop has not seen it yet.
                self._transport.abort()
