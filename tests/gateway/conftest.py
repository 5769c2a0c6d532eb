"""A gateway on real sockets in front of a scripted verifier."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import fields

import httpx
import openai
import pytest
import pytest_asyncio
from gateway_rig import TARGET, Rig, echo, is_ready, until
from scripted_verifier import Script, ScriptedVerifier, ready

from gateway import routing
from gateway.config import GatewaySettings
from gateway.metrics import Metrics
from gateway.prompts import Prompts
from gateway.server import running
from outrider import rpc
from outrider.v1 import generation_pb2_grpc, verifier_pb2_grpc


@pytest.fixture(scope="session")
def prompts() -> Prompts:
    return Prompts(TARGET)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_rig(prompts: Prompts) -> AsyncIterator[Rig]:
    script = Script(ready(prompts.fingerprint), echo)
    server = rpc.Server("outrider.v1.VerifierService")
    verifier_pb2_grpc.add_VerifierServiceServicer_to_server(ScriptedVerifier(script), server.grpc)
    [port] = await server.start("127.0.0.1:0")
    settings = GatewaySettings(
        verifier=[f"127.0.0.1:{port}"],
        tokenizer=TARGET,
        http_port=0,
        grpc_listen="127.0.0.1:0",
        max_body_bytes=65536,
        max_sequences=8,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routing, "_POLL_READY_S", 0.05)  # so that a test need not wait a second to see a change
        async with running_rig(settings, script, prompts) as rig:
            yield rig
    await server.stop(0)


@contextlib.asynccontextmanager
async def running_rig(settings: GatewaySettings, script: Script, prompts: Prompts) -> AsyncIterator[Rig]:
    async with (
        running(settings, Metrics()) as gateway,
        httpx.AsyncClient(base_url=gateway.http_url) as http,
        openai.AsyncOpenAI(base_url=f"{gateway.http_url}/v1", api_key="any", max_retries=0) as client,
    ):
        channel = rpc.dial(gateway.grpc_address)
        yield Rig(gateway, script, prompts, http, client, generation_pb2_grpc.GenerationServiceStub(channel))
        await channel.close()


@pytest_asyncio.fixture(loop_scope="session")
async def rig(shared_rig: Rig) -> Rig:
    """The shared gateway, ready, with a verifier that remembers nothing and echoes."""
    script, fresh = shared_rig.script, Script(ready(shared_rig.prompts.fingerprint), echo)
    await until(lambda: script.running == 0)
    for field in fields(Script):
        setattr(script, field.name, getattr(fresh, field.name))
    await until(lambda: is_ready(shared_rig.http))
    await until(lambda: shared_rig.gateway.router.replicas[0].info == script.info)
    return shared_rig
