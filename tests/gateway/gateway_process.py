"""Run `python -m gateway` as a process, in front of a verifier that plays a test's script."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from gateway.text.prompts import Prompts
from tests.gateway.gateway_rig import echo
from tests.gateway.scripted_verifier import Script, ready, serving
from tests.stack import GatewayProcess


@asynccontextmanager
async def gateway_process(
    prompts: Prompts, *flags: str, verifier: str = "127.0.0.1:{port}"
) -> AsyncIterator[tuple[GatewayProcess, Script]]:
    """Run a gateway during the block; yield it, once it is ready, and its verifier's script.

    `verifier` is the name by which the gateway finds the verifier.
    """
    script = Script(ready(prompts.fingerprint), echo)
    async with serving(script) as address:
        port = address.rpartition(":")[2]
        gateway = GatewayProcess(verifier.format(port=port), flags=flags)
        try:
            await asyncio.to_thread(gateway.wait_ready)
            yield gateway, script
        finally:
            gateway.kill()
            gateway.log.close()
