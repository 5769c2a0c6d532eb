"""Run `python -m gateway` as a process, in front of a verifier that plays a test's script."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from gateway_rig import TARGET, echo, is_ready
from scripted_verifier import Script, ready, serving
from waiting import until

from gateway.text.prompts import Prompts


@dataclass
class GatewayProcess:
    """A running gateway: its addresses, its verifier's script and its log."""

    script: Script
    http_url: str
    grpc_address: str
    process: asyncio.subprocess.Process
    log: list[str] = field(default_factory=list)

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    async def ended(self) -> int:
        """Its exit status."""
        async with asyncio.timeout(60):
            return await self.process.wait()


@asynccontextmanager
async def gateway_process(
    prompts: Prompts, log: Path, *arguments: str, tokenizer: str = TARGET
) -> AsyncIterator[GatewayProcess]:
    """Run a gateway until the block ends, and wait until it is ready. It logs to the file `log`."""
    script = Script(ready(prompts.fingerprint), echo)
    async with serving(script) as address:
        command = [sys.executable, "-m", "gateway", "--verifier", address, "--tokenizer", tokenizer]
        command += ["--http-port", "0", "--grpc-listen", "127.0.0.1:0", *arguments]
        with log.open("w") as errors:
            process = await asyncio.create_subprocess_exec(
                *command, stdout=asyncio.subprocess.PIPE, stderr=errors, env=os.environ
            )
        try:
            assert process.stdout is not None
            words = (await process.stdout.readline()).decode().split()
            gateway = GatewayProcess(script, words[3], words[7], process)
            async with httpx.AsyncClient(base_url=gateway.http_url) as http:
                await until(lambda: is_ready(http), timeout_s=30)
            yield gateway
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()
