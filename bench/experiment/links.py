"""A link that shapes TCP connections: round trip, jitter, bandwidth, loss, outages and resets, as a proxy in user space.

Knows bytes and times; not who talks over it. It needs a loop whose timers are exact, see `exact_loop`.
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
from statistics import quantiles

from bench.experiment.records import LinkTraffic
from bench.experiment.spec import Link

SEGMENT_BYTES = 1_460
"""What TCP sends at once over Ethernet."""

_LATENESS_COUNT = 20_000
_LEAST_QUEUE_BYTES = 1 << 20
_LINGER = struct.pack("ii", 1, 0)


def exact_loop() -> asyncio.AbstractEventLoop:
    """An event loop whose timers are not rounded to whole milliseconds, as those of epoll and libuv are."""
    return asyncio.SelectorEventLoop(selectors.SelectSelector())


@dataclass(frozen=True, slots=True)
class Lateness:
    """By how much the proxy itself delivered later than the link's shape asks for, in milliseconds."""

    p50_ms: float
    p99_ms: float


@dataclass(slots=True)
class _Wire:
    """One direction of a link, which all connections share."""

    free_at: float = 0.0
    byte_count: int = 0


@dataclass(eq=False)
class ShapedLink:
    """A link in both directions. Its shape may be changed while it runs; what is under way keeps the shape it left with."""

    shape: Link
    seed: int = 0
    connection_count: int = 0
    lost_segment_count: int = 0
    held_until: float = 0.0
    """Time of the loop until which an outage holds all bytes."""

    def __post_init__(self) -> None:
        self.up, self.down = _Wire(), _Wire()
        self.late_s: deque[float] = deque(maxlen=_LATENESS_COUNT)
        self._random = random.Random(self.seed)
        self._ends: set[_End] = set()

    def change(self, shape: Link) -> None:
        """Shape what comes from now on by this."""
        self.shape = shape
        self.up.free_at = self.down.free_at = 0.0

    def outage(self, seconds: float) -> None:
        """Hold all bytes and new connections back for so long; nothing is lost."""
        self.held_until = asyncio.get_running_loop().time() + seconds

    def reset(self) -> None:
        """Cut all connections, as a machine does that knows nothing of them: both sides receive RST."""
        for end in list(self._ends):
            end.reset()

    @property
    def traffic(self) -> LinkTraffic:
        """Bytes and connections since the start."""
        return LinkTraffic(
            self.up.byte_count, self.down.byte_count, self.connection_count, self.lost_segment_count
        )

    @property
    def lateness(self) -> Lateness:
        """Of the last deliveries; zero where there were fewer than two."""
        if len(self.late_s) < 2:
            return Lateness(0.0, 0.0)
        cuts = quantiles(self.late_s, n=100)
        return Lateness(1000 * cuts[49], 1000 * cuts[98])

    @property
    def round_trip_s(self) -> float:
        """What it adds to a round trip, without jitter."""
        return self.shape.round_trip_ms / 1000

    @property
    def queue_bytes(self) -> int:
        """Bytes of a connection and direction that may be under way before its sender is held up, as by TCP's window."""
        product = self.shape.mbit_s * 125_000 * self.round_trip_s
        return max(_LEAST_QUEUE_BYTES, round(2 * product))

    @asynccontextmanager
    async def forward(
        self, listen: tuple[str, int], target: tuple[str, int]
    ) -> AsyncIterator[None]:
        """Listen, and pass connections on to `target` over this link; may be called for several ports."""
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: _End(self, target), *listen)
        try:
            yield
        finally:
            server.close()
            self.reset()
            await asyncio.sleep(0)  # transports close in the loop's next turn

    def schedule(
        self, wire: _Wire, data: bytes, leaves: float, last: float
    ) -> Iterator[tuple[float, bytes]]:
        """When each piece of `data` comes out, if it goes in at `leaves` and no sooner than `last`, which came before."""
        shape, rate = self.shape, self.shape.mbit_s * 125_000
        jitter_s = self._random.uniform(0.0, shape.jitter_ms / 1000)
        size = SEGMENT_BYTES if rate or shape.loss else len(data)
        for start in range(0, len(data), size):
            piece = data[start : start + size]
            wire.free_at = max(wire.free_at, leaves) + (len(piece) / rate if rate else 0.0)
            at = wire.free_at + self.round_trip_s / 2 + jitter_s
            if shape.loss and self._random.random() < shape.loss:
                self.lost_segment_count += 1
                at += max(shape.retransmit_ms / 1000, self.round_trip_s)
            last = max(last, at)
            yield last, piece


@dataclass(eq=False)
class _End(asyncio.Protocol):
    """One end of a connection. What it receives waits here until it is due at the other end.

    An end that was accepted dials its target; the other one is made with that.
    """

    link: ShapedLink
    target: tuple[str, int] | None
    peer: _End | None = None
    opens_at: float = 0.0
    """When the handshake is over, before which nothing leaves."""
    is_full: bool = False
    """Whether this end's socket takes no more for now."""
    queue: deque[tuple[float, bytes | None]] = field(default_factory=deque)
    """What is due when: bytes, b"" for the end of the stream, None for the end of the connection."""

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._dialling: asyncio.Task[None] | None = None
        self._waiting_bytes = 0
        self._last = 0.0
        self._wire = self.link.up if self.target is not None else self.link.down

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(
            transport, asyncio.Transport
        )  # create_server and create_connection make no other
        self._transport = transport
        self.link._ends.add(self)
        if self.target is not None:
            self.link.connection_count += 1
            self.opens_at = max(self._loop.time(), self.link.held_until) + self.link.round_trip_s
            self._dialling = asyncio.create_task(self._dial(*self.target))

    async def _dial(self, host: str, port: int) -> None:
        """Connect to the target when the handshake would have come through; a refusal is passed on as RST."""
        await asyncio.sleep(self.opens_at - self.link.round_trip_s / 2 - self._loop.time())
        await asyncio.sleep(
            self.link.held_until - self._loop.time()
        )  # an outage may have begun meanwhile
        far = _End(self.link, None, peer=self)
        try:
            await self._loop.create_connection(lambda: far, host, port)
        except OSError:
            self.reset()
            return
        self.peer = far
        self._arm()

    def data_received(self, data: bytes) -> None:
        self._wire.byte_count += len(data)
        self._waiting_bytes += len(data)
        leaves = max(self._loop.time(), self.opens_at)
        self._put(*self.link.schedule(self._wire, data, leaves, self._last))
        if self._waiting_bytes > self.link.queue_bytes and self._transport is not None:
            self._transport.pause_reading()

    def eof_received(self) -> bool:
        self._put((self._in_order(), b""))
        return True  # the other direction stays open

    def connection_lost(self, exc: Exception | None) -> None:
        self.link._ends.discard(self)
        self._transport = None
        self._put((self._in_order(), None))

    def pause_writing(self) -> None:
        self.is_full = True

    def resume_writing(self) -> None:
        self.is_full = False
        if self.peer is not None:
            self.peer._arm()

    def reset(self) -> None:
        """Send RST and forget everything."""
        self.queue.clear()
        if self._timer is not None:
            self._timer.cancel()
        if self._dialling is not None:
            self._dialling.cancel()
        if self._transport is not None:
            connection = self._transport.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER)
            self._transport.abort()

    def _in_order(self) -> float:
        """When what is said now without bytes comes out."""
        return max(self._last, self._loop.time() + self.link.round_trip_s / 2)

    def _put(self, *pieces: tuple[float, bytes | None]) -> None:
        for at, piece in pieces:
            self._last = at
            self.queue.append((at, piece))
        self._arm()

    def _arm(self) -> None:
        """Set the timer for the next piece, if there is one that the other end can take."""
        if self._timer is None and self.queue and self.peer is not None and not self.peer.is_full:
            self._timer = self._loop.call_at(
                max(self.queue[0][0], self.link.held_until), self._deliver
            )

    def _deliver(self) -> None:
        """Hand over all that is due."""
        self._timer = None
        peer = self.peer
        while self.queue and peer is not None and not peer.is_full:
            due = max(self.queue[0][0], self.link.held_until)
            if due > self._loop.time():
                break
            self.link.late_s.append(self._loop.time() - due)
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
        if piece is None:
            self._transport.close()
        elif piece:
            self._transport.write(piece)
        elif self._transport.can_write_eof():
            self._transport.write_eof()
