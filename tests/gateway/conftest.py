"""A gateway on real sockets in front of a scripted verifier."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest
from scripted_verifier import Script, ScriptedVerifier, last, plain, ready

from gateway.config import GatewaySettings
from gateway.prompts import Prompts
from gateway.server import Gateway, running
from outrider import rpc
from outrider.messages import FinishReason, TokenRequest
from outrider.v1 import generation_pb2_grpc, verifier_pb2_grpc

TARGET = str(Path(__file__).parents[2] / "models/target")


@pytest.fixture(scope="session")
def prompts() -> Prompts:
    return Prompts(TARGET)


@dataclass
class Rig:
    """The gateway under test, its clients, and the script its verifier plays."""

    gateway: Gateway
    script: Script
    prompts: Prompts
    http: httpx.AsyncClient
    client: openai.AsyncOpenAI
    generation: generation_pb2_grpc.GenerationServiceAsyncStub

    def says(self, text: str, chunk: int = 1, reason: FinishReason = FinishReason.STOP, pause_s: float = 0.0) -> list[int]:
        """Let the verifier answer every request with a text, some tokens at a time; the text's ids."""
        ids = self.prompts.tokenizer.encode(text).ids
        pieces = [ids[at : at + chunk] for at in range(0, len(ids), chunk)]
        pause = [pause_s] if pause_s else []
        steps = [step for piece in pieces for step in (plain(piece), *pause)]
        ending = last([3], reason) if reason is FinishReason.STOP else last([], reason)
        self.script.answer = lambda request: [*steps, ending]
        return ids


def echo(request: TokenRequest) -> list:
    """By default the verifier says the prompt once more."""
    return [plain(request.prompt), last([3], FinishReason.STOP)]


async def until_ready(http: httpx.AsyncClient, status: int = 200) -> None:
    async with asyncio.timeout(5):
        while (await http.get("/readyz")).status_code != status:
            await asyncio.sleep(0.02)


@pytest.fixture
async def rig(prompts: Prompts) -> AsyncIterator[Rig]:
    script = Script(ready(prompts.fingerprint), echo)
    server = rpc.Server("outrider.v1.VerifierService")
    verifier_pb2_grpc.add_VerifierServiceServicer_to_server(ScriptedVerifier(script), server.grpc)
    [port] = await server.start("127.0.0.1:0")
    settings = GatewaySettings(
        verifier=[f"127.0.0.1:{port}"],
        tokenizer=TARGET,
        http_port=0,
        grpc_listen="127.0.0.1:0",
        drain_seconds=1.0,
        max_body_bytes=65536,
    )
    async with (
        running(settings) as gateway,
        httpx.AsyncClient(base_url=gateway.http_url) as http,
        openai.AsyncOpenAI(base_url=f"{gateway.http_url}/v1", api_key="any", max_retries=0) as client,
    ):
        await until_ready(http)
        channel = rpc.dial(gateway.grpc_address)
        yield Rig(gateway, script, prompts, http, client, generation_pb2_grpc.GenerationServiceStub(channel))
        await channel.close()
    await server.stop(0)
