"""A verifier with TLS on a free port."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from outrider.process.security.tls import Tls
from tests.verifier import served_engine
from verifier_svc.engine.loop import Engine

FINGERPRINT = "f"


@asynccontextmanager
async def verifier(tls: Tls | None) -> AsyncIterator[tuple[str, Engine]]:
    """Yield a verifier's address and its engine, whose model is a table."""
    async with served_engine.verifier(tls) as served:
        yield served.address, served.engine
