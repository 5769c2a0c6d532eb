"""`outrider health` exits with 0 if a process serves, else with 1 and the reason."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from outrider.process.network import rpc
from outrider.process.settings.usage import invoke
from outrider_cli.main import app

SERVICE = "outrider.v1.VerifierService"


async def ask(*arguments: str) -> int:
    """Return the exit status of `outrider health`."""
    status = await asyncio.to_thread(invoke, app, "outrider", ["health", *arguments])
    return int(status or 0)


@asynccontextmanager
async def serving(address: str = "127.0.0.1:0") -> AsyncIterator[tuple[rpc.Server, str]]:
    server = rpc.Server(SERVICE)
    [port] = await server.start(address)
    yield server, f"127.0.0.1:{port}"
    await server.stop(0)


async def test_a_process_is_healthy_while_it_serves_as_a_whole_and_by_service(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with serving() as (server, address):
        assert await ask(address, "--service", SERVICE) == 1
        assert f"{SERVICE} is NOT_SERVING" in capsys.readouterr().err
        await server.set_serving(True)
        assert await ask(address) == 0
        assert await ask(address, "--service", SERVICE) == 0
        assert capsys.readouterr().err == ""
        assert await ask(address, "--service", "outrider.v1.Drafter") == 1
        assert "there is no service 'outrider.v1.Drafter'" in capsys.readouterr().err


async def test_the_error_names_a_dead_address_within_the_timeout(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert await ask("127.0.0.1:1") == 1
    complaint = capsys.readouterr().err
    assert "127.0.0.1:1: UNAVAILABLE" in complaint or "127.0.0.1:1: DEADLINE_EXCEEDED" in complaint
