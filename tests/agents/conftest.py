"""Two gateways for released clients: of the bundled pair, and of a scripted model."""

import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

sys.path.insert(0, str(Path(__file__).parents[1] / "gateway"))

from gateway_rig import Rig
from scripted_model import MODEL, running_scripted
from stack import GatewayProcess, Stack, running


@pytest.fixture(scope="session")
def real() -> Iterator[str]:
    """The URL of a gateway in front of a verifier and two drafters."""
    stack = Stack("--model-name", MODEL)
    stack.add_drafter("ngram-1", "ngram")
    stack.add_drafter("model-1", "model")
    with running(stack):
        gateway = GatewayProcess(stack.address)
        try:
            gateway.wait_ready()
            yield gateway.url
        finally:
            gateway.close()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def scripted() -> AsyncIterator[Rig]:
    """A gateway whose model calls tools."""
    async with running_scripted() as rig:
        yield rig
