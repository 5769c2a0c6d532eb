"""A TCP proxy that delays the server's bytes and splits them, both at random.

Run as a program, it prints its port.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import uvloop

_DELAY_S = 0.002


async def _pass_on(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, rng: random.Random | None
) -> None:
    """Pass bytes on; with `rng`, split each read into up to three pieces with delays between."""
    try:
        while data := await reader.read(65_536):
            if rng is not None:
                for _ in range(2):
                    await asyncio.sleep(rng.random() * _DELAY_S)
                    cut = rng.randrange(len(data) + 1)
                    writer.write(data[:cut])
                    data = data[cut:]
            writer.write(data)
            await writer.drain()
    # One side has closed its connection. Close the other as well.
    except OSError:
        pass
    finally:
        writer.close()


async def _serve(port: int) -> None:
    rng = random.Random(0)

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(
            _pass_on(reader, server_writer, None), _pass_on(server_reader, writer, rng)
        )

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


@asynccontextmanager
async def delaying_proxy(port: int) -> AsyncIterator[int]:
    """Run a proxy to the server at `port` as a process; yields the proxy's port."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, Path(__file__), str(port), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        yield int(await process.stdout.readline())
    finally:
        process.kill()
        await process.wait()


if __name__ == "__main__":
    uvloop.run(_serve(int(sys.argv[1])))
