"""A TCP proxy that can lose all bytes of its connections while they stay open."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class ChaosProxy:
    """Passes bytes on until `swallow`; later connections pass bytes on again.

    `delay_s` passes before it passes bytes on, in each direction. `carried` has all bytes that
    arrived, of both directions; `openings` has the first bytes of each connection's client.
    """

    def __init__(self, target_port: int, delay_s: float = 0.0) -> None:
        self.port = 0
        self.carried = bytearray()
        self.openings: list[bytes] = []
        self._target_port = target_port
        self._delay_s = delay_s
        self._tasks: set[asyncio.Task[None]] = set()
        self._open: set[asyncio.Event] = set()

    def swallow(self) -> None:
        """Lose all further bytes of the present connections, as if a machine had vanished."""
        for is_open in self._open:
            is_open.clear()
        self._open.clear()

    async def serve(self) -> asyncio.Server:
        """Listen on a free port, which `port` holds afterwards."""
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        return server

    async def close(self) -> None:
        """Abort all connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        # Transports close in the next iteration of the loop.
        await asyncio.sleep(0)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        is_open = asyncio.Event()
        is_open.set()
        self._open.add(is_open)
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            writer.close()
            return
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pass_on(reader, far_writer, is_open, self.openings))
                both.create_task(self._pass_on(far_reader, writer, is_open, []))
        except asyncio.CancelledError:
            # `close` cancels this task, and asyncio would report an error. Unsent bytes would keep
            # the connections open, so they are aborted.
            writer.transport.abort()
            far_writer.transport.abort()
        finally:
            writer.close()
            far_writer.close()
            self._tasks.discard(task)

    async def _pass_on(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        is_open: asyncio.Event,
        openings: list[bytes],
    ) -> None:
        """Pass bytes on as they come; after `swallow` not even the end is passed on.

        The first bytes are added to `openings`.
        """
        is_first = True
        try:
            while data := await reader.read(65_536):
                if is_first:
                    openings.append(data)
                    is_first = False
                self.carried += data
                await asyncio.sleep(self._delay_s)
                if is_open.is_set():
                    writer.write(data)
                    await writer.drain()
        except OSError:
            # One side hung up; closing the writer tells the other.
            pass
        if is_open.is_set():
            writer.close()


@asynccontextmanager
async def chaos_proxy(target_port: int, delay_s: float = 0.0) -> AsyncIterator[ChaosProxy]:
    """A proxy in front of the server at 127.0.0.1:`target_port`."""
    proxy = ChaosProxy(target_port, delay_s)
    server = await proxy.serve()
    try:
        yield proxy
    finally:
        server.close()
        await proxy.close()
