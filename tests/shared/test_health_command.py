"""`outrider health` exits with 0 if a process serves, else with 1 and the reason."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from outrider.process import rpc

ROOT = Path(__file__).parents[2]
SERVICE = "outrider.v1.VerifierService"


async def ask(*arguments: str) -> tuple[int, str]:
    """The exit status and standard error of `outrider health`."""
    command = (sys.executable, "-m", "outrider.launch.cli", "health", *arguments)
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stderr=subprocess.PIPE)
    _, complaint = await asyncio.wait_for(process.communicate(), 20)
    return process.returncode or 0, complaint.decode()


@asynccontextmanager
async def serving(address: str = "127.0.0.1:0") -> AsyncIterator[tuple[rpc.Server, str]]:
    server = rpc.Server(SERVICE)
    [port] = await server.start(address)
    yield server, f"127.0.0.1:{port}"
    await server.stop(0)


async def test_a_serving_process_is_healthy_as_a_whole_and_by_service() -> None:
    async with serving() as (server, address):
        await server.set_serving(True)
        assert await ask(address) == (0, "")
        assert await ask(address, "--service", SERVICE) == (0, "")


async def test_a_process_that_loads_or_drains_is_not_healthy() -> None:
    async with serving() as (_, address):
        status, complaint = await ask(address, "--service", SERVICE)
    assert status == 1
    assert f"{SERVICE} is NOT_SERVING" in complaint


async def test_the_error_names_a_service_that_the_process_lacks() -> None:
    async with serving() as (server, address):
        await server.set_serving(True)
        status, complaint = await ask(address, "--service", "outrider.v1.Drafter")
    assert status == 1
    assert "there is no service 'outrider.v1.Drafter'" in complaint


async def test_the_error_names_a_dead_address_within_the_timeout() -> None:
    status, complaint = await ask("127.0.0.1:1", "--timeout", "0.5")
    assert status == 1
    assert "127.0.0.1:1: UNAVAILABLE" in complaint or "127.0.0.1:1: DEADLINE_EXCEEDED" in complaint


async def test_health_works_over_a_unix_socket(tmp_path: Path) -> None:
    address = f"unix:{tmp_path / 'process.sock'}"
    async with serving(address) as (server, _):
        await server.set_serving(True)
        assert await ask(address) == (0, "")
