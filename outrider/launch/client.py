"""Talks to a stack on this host over HTTP: until it is ready, and one request at a time. For the command line, not for services."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

# A start goes through stages that last less, and through the gateway's polls, which come once a second.
_WORTH_TELLING_S = 10.0


async def until_ready(url: str, tell: Callable[[str], None], drafters: int) -> None:
    """Wait until the gateway takes requests and as many drafters are connected; `tell` hears once what takes several seconds."""
    told, stage, since = "", "", time.monotonic()
    async with httpx.AsyncClient(base_url=url, timeout=5) as client:
        while True:
            before = stage
            stage, ready = await _stage(client, drafters)
            if ready:
                return
            if stage != before:
                since = time.monotonic()
            if stage not in ("", told) and time.monotonic() - since > _WORTH_TELLING_S:
                tell(stage)
                told = stage
            await asyncio.sleep(0.2)


async def _stage(client: httpx.AsyncClient, drafters: int) -> tuple[str, bool]:
    """The stage under way ("" if it is no news), and whether all are ready."""
    try:
        body = (await client.get("/readyz")).json()
    except (httpx.TransportError, ValueError):
        return "", False
    if body["status"] == "unavailable":
        # The verifier does not listen yet. If it never will, its process ends and says why.
        return "", False
    if body["status"] == "loading":
        return "; ".join(
            f"loading {v['model']}: {v['stage_detail']}"
            for v in body["verifiers"]
            if not v["ready"]
        ), False
    if body["status"] not in ("ready", "degraded"):
        return f"{body['status']}: {body['detail']}", False
    connected = sum(
        drafter["connected"] for verifier in body["verifiers"] for drafter in verifier["drafters"]
    )
    return f"{connected} of {drafters} drafters are connected", connected >= drafters


@dataclass(frozen=True, slots=True)
class Answer:
    """A completion's text and statistics: `speculative` is `metrics.speculative_decoding`, None for plain decoding."""

    text: str
    token_count: int
    seconds: float
    speculative: dict[str, Any] | None


async def complete(
    client: httpx.AsyncClient, model: str, prompt: str, max_tokens: int, speculation: dict[str, Any]
) -> Answer:
    """One greedy completion; raises httpx.HTTPStatusError with the server's message when it is refused."""
    started = asyncio.get_running_loop().time()
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "speculation": speculation,
    }
    response = await client.post("/v1/completions", json=body)
    if response.is_error:
        raise httpx.HTTPStatusError(response.text, request=response.request, response=response)
    answer = response.json()
    seconds = asyncio.get_running_loop().time() - started
    speculative = (answer.get("metrics") or {}).get("speculative_decoding")
    return Answer(
        answer["choices"][0]["text"], answer["usage"]["completion_tokens"], seconds, speculative
    )
