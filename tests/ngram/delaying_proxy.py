"""A TCP proxy that holds back what the server says and cuts it into pieces, both at random; as a program it prints its port."""

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
    """As it comes; with `rng`, each read in up to three pieces, each after a wait."""
    try:
        while data := await reader.read(65_536):
            for _ in range(2 if rng else 0):
                assert rng is not None
                await asyncio.sleep(rng.random() * _DELAY_S)
                cut = rng.randrange(len(data) + 1)
                writer.write(data[:cut])
                data = data[cut:]
            writer.write(data)
            await writer.drain()
    except OSError:
        pass  # one side hung up, so the other is told
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
    """One before the server at `port`, as a process, by its port."""
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
