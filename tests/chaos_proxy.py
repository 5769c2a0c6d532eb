"""A TCP proxy whose connections can fall into a hole: they stay open, and nothing comes through any more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class ChaosProxy:
    """Passes bytes on until `swallow`; connections made after that pass bytes on again."""

    def __init__(self, target_port: int) -> None:
        self.port = 0
        self._target_port = target_port
        self._tasks: set[asyncio.Task[None]] = set()
        self._open: set[asyncio.Event] = set()

    def swallow(self) -> None:
        """From now on lose all bytes of the connections there are, both ways, as when a machine vanishes."""
        for is_open in self._open:
            is_open.clear()
        self._open.clear()

    async def serve(self) -> asyncio.Server:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        return server

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        # Transports close in the loop's next turn.
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
                both.create_task(_pass_on(reader, far_writer, is_open))
                both.create_task(_pass_on(far_reader, writer, is_open))
        except asyncio.CancelledError:
            # By `close`; asyncio takes it for an error of this function's. What is unsent would keep the connections open.
            writer.transport.abort()
            far_writer.transport.abort()
        finally:
            writer.close()
            far_writer.close()
            self._tasks.discard(task)


async def _pass_on(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_open: asyncio.Event
) -> None:
    """As it comes; in a hole not even the end of a connection comes through."""
    try:
        while data := await reader.read(65_536):
            if is_open.is_set():
                writer.write(data)
                await writer.drain()
    except OSError:
        pass  # one side hung up, so the other is told
    if is_open.is_set():
        writer.close()


@asynccontextmanager
async def chaos_proxy(target_port: int) -> AsyncIterator[ChaosProxy]:
    """One before the server at 127.0.0.1:`target_port`."""
    proxy = ChaosProxy(target_port)
    server = await proxy.serve()
    try:
        yield proxy
    finally:
        server.close()
        await proxy.close()
