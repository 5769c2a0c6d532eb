"""What the gateway's tests share: the gateway under test with its clients, and waiting for a peer's state."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
from scripted_verifier import Script, Step, last, plain

from gateway.config import GatewaySettings
from gateway.metrics import Metrics
from gateway.prompts import Prompts
from gateway.server import Gateway, running
from outrider.messages import FinishReason, TokenRequest
from outrider.process import rpc
from outrider.v1 import generation_pb2_grpc

TARGET = str(Path(__file__).parents[2] / "models/target")


@dataclass
class Rig:
    """The gateway under test, its clients, and the script its verifier plays."""

    gateway: Gateway
    script: Script
    prompts: Prompts
    http: httpx.AsyncClient
    client: openai.AsyncOpenAI
    generation: generation_pb2_grpc.GenerationServiceAsyncStub

    def says(
        self,
        text: str,
        chunk: int = 1,
        reason: FinishReason = FinishReason.STOP,
        pause_s: float = 0.0,
    ) -> list[int]:
        """Let the verifier answer every request with a text, some tokens at a time; the text's ids."""
        ids = self.prompts.tokenizer.encode(text).ids
        pieces = [ids[at : at + chunk] for at in range(0, len(ids), chunk)]
        pause = [pause_s] if pause_s else []
        steps = [step for piece in pieces for step in (plain(piece), *pause)]
        ending = last([3], reason) if reason is FinishReason.STOP else last([], reason)
        self.script.answer = lambda request: [*steps, ending]
        return ids


def echo(request: TokenRequest) -> list[Step]:
    """By default the verifier says the prompt once more."""
    return [plain(request.prompt), last([3], FinishReason.STOP)]


async def is_ready(http: httpx.AsyncClient) -> bool:
    return (await http.get("/readyz")).status_code == 200


async def until(condition: Callable[[], bool | Awaitable[bool]], timeout_s: float = 5.0) -> None:
    """Wait for what has no event to wait for: the state of another process's poll or of a peer's call."""
    async with asyncio.timeout(timeout_s):
        while not ((await met) if isinstance(met := condition(), Awaitable) else met):  # noqa: ASYNC110  # see above
            await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def running_rig(
    settings: GatewaySettings, script: Script, prompts: Prompts
) -> AsyncIterator[Rig]:
    """A gateway of its own with its clients."""
    async with (
        running(settings, Metrics()) as gateway,
        httpx.AsyncClient(base_url=gateway.http_url) as http,
        openai.AsyncOpenAI(
            base_url=f"{gateway.http_url}/v1", api_key="any", max_retries=0
        ) as client,
    ):
        channel = rpc.dial(gateway.grpc_address)
        yield Rig(
            gateway,
            script,
            prompts,
            http,
            client,
            generation_pb2_grpc.GenerationServiceStub(channel),
        )
        await channel.close()


def model_with_template(folder: Path, template: object, **config: object) -> str:
    """The bundled model's tokenizer with another chat template, in a folder."""
    for name in ("tokenizer.json", "config.json"):
        shutil.copy(Path(TARGET) / name, folder)
    known = json.loads((Path(TARGET) / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps(known | {"chat_template": template} | config)
    )
    return str(folder)
