"""Two gateways for released clients: one has the bundled pair, the other a scripted model."""

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from tests.agents.scripted_model import MODEL, running_scripted
from tests.gateway.gateway_rig import Rig
from tests.stack import GatewayProcess, Stack, running


@pytest.fixture(scope="session")
def real() -> Iterator[str]:
    """Yield the URL of a gateway in front of a verifier and two drafters."""
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
    """Yield a gateway whose model calls tools."""
    async with running_scripted() as rig:
        yield rig
