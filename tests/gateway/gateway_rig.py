"""What the gateway's tests share: a gateway with its clients, and answers of its verifier."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from gateway import server
from gateway.config import GatewaySettings
from gateway.metrics import GatewayMetrics
from gateway.server import Gateway, running
from gateway.text.prompts import Prompts
from outrider.process.network import rpc
from outrider.protocol.messages import FinishReason, TokenRequest
from outrider.v1 import generation_pb2_grpc
from tests.gateway.scripted_verifier import Script, Step, last, plain, ready, serving
from tests.waiting import until

TARGET = str(Path(__file__).parents[2] / "models/target")


@dataclass
class Rig:
    """The gateway under test, its clients, and the script that its verifier plays."""

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
        cached: int = 0,
    ) -> list[int]:
        """Let the verifier answer every request with a text, `chunk` tokens at a time.

        Returns the text's ids.
        """
        ids = self.prompts.tokenizer.encode(text).ids
        steps: list[Step] = []
        for at in range(0, len(ids), chunk):
            steps.append(plain(ids[at : at + chunk]))
            if pause_s:
                steps.append(pause_s)
        end = [3] if reason is FinishReason.STOP else []
        steps.append(last(end, reason, cached=cached))
        self.script.answer = lambda request: steps
        return ids


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the events of a stream, and check that the stream ends correctly."""
    *lines, done, end = response.text.split("\n\n")
    assert (response.status_code, done, end) == (200, "data: [DONE]", "")
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def settings(*verifiers: str, **given: Any) -> GatewaySettings:
    """Return the settings of a gateway on free ports for the verifiers at these addresses."""
    chosen: dict[str, Any] = {"tokenizer": TARGET, "http_port": 0, "grpc_listen": "127.0.0.1:0"}
    return GatewaySettings(verifier=list(verifiers), **chosen | given)


def echo(request: TokenRequest) -> list[Step]:
    """Return the default answer of the verifier: the prompt's own tokens."""
    return [plain(request.prompt), last([3], FinishReason.STOP)]


def echo_within_limit(request: TokenRequest) -> list[Step]:
    """Return the prompt's own tokens, at most as many as the request allows."""
    ids = request.prompt[: request.max_tokens]
    if len(ids) == request.max_tokens:
        return [plain(ids), last([], FinishReason.LENGTH)]
    return [plain(ids), last([3], FinishReason.STOP)]


async def is_ready(http: httpx.AsyncClient) -> bool:
    return (await http.get("/readyz")).status_code == 200


@contextlib.asynccontextmanager
async def running_rig(
    chosen: GatewaySettings, script: Script, prompts: Prompts
) -> AsyncIterator[Rig]:
    """Run a gateway with its clients during the block."""
    async with contextlib.AsyncExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            # With its own templates, each gateway would start a process, which takes half a second.
            patch.setattr(server, "Prompts", lambda *_: prompts)
            gateway = await stack.enter_async_context(running(chosen, GatewayMetrics()))
        http = httpx.AsyncClient(base_url=gateway.http_url, timeout=60)
        client = openai.AsyncOpenAI(base_url=f"{gateway.http_url}/v1", api_key="any", max_retries=0)
        await stack.enter_async_context(http)
        await stack.enter_async_context(client)
        channel = rpc.dial(gateway.grpc_address)
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        yield Rig(gateway, script, prompts, http, client, stub)
        await channel.close(None)


@contextlib.asynccontextmanager
async def own_rig(prompts: Prompts, **given: Any) -> AsyncIterator[Rig]:
    """Run a gateway with these settings, in front of a verifier that echoes prompts."""
    script = Script(ready(prompts.fingerprint), echo)
    async with (
        serving(script) as address,
        running_rig(settings(address, **given), script, prompts) as rig,
    ):
        await until(lambda: is_ready(rig.http))
        yield rig


@contextlib.asynccontextmanager
async def rig_with_template(folder: Path, template: str, **given: Any) -> AsyncIterator[Rig]:
    """Run a gateway whose model has this chat template. The model's files are in `folder`."""
    model = model_with_template(folder, template)
    prompts = Prompts(model, given.get("tool_format", ""))
    async with own_rig(prompts, tokenizer=model, **given) as rig:
        yield rig


def model_with_template(folder: Path, template: object, **config: object) -> str:
    """Write the bundled model's tokenizer with another chat template to a folder."""
    for name in ("tokenizer.json", "config.json"):
        shutil.copy(Path(TARGET) / name, folder)
    known = json.loads((Path(TARGET) / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps(known | {"chat_template": template} | config)
    )
    return str(folder)


def text_by_part(choice: dict[str, Any]) -> dict[str, str]:
    """Return the text of each part of an answer, joined from its attributed tokens.

    A part's text includes its marks.
    """
    texts: dict[str, str] = {}
    open_text = ""
    for token in choice["speculation"]["tokens"]:
        open_text += token["text"]
        if token["part"] is not None:
            texts[token["part"]] = texts.get(token["part"], "") + open_text
            open_text = ""
    texts[list(texts)[-1]] += open_text
    return texts
