"""Starts drafters as processes, and stops them."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.process.network import rpc

ROOT = Path(__file__).parents[2]
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@asynccontextmanager
async def python(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Yield a process that runs this interpreter. The process is killed at the end."""
    environment = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, cwd=ROOT, env=os.environ | environment, stdout=-1, stderr=-1
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@asynccontextmanager
async def drafter(*flags: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Yield a drafter process, which is killed at the end."""
    async with python("-m", "drafter_svc", *flags) as process:
        yield process


async def health(port: int) -> int:
    """Return the status that a drafter's health service reports."""
    async with rpc.dial(f"127.0.0.1:{port}") as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        response = await check(
            health_pb2.HealthCheckRequest(service="outrider.v1.Drafter"),
            wait_for_ready=True,
            timeout=10,
        )
        status: int = response.status
        return status
