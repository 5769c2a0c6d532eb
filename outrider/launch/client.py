"""A client of the stack on this host, over HTTP: waits until it serves, and sends requests.

For the command line, not for services.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

_POLL_S = 0.2


async def until_ready(
    url: str, show: Callable[[str], None], drafters: int, ca: Path | None = None
) -> None:
    """Wait until the gateway takes requests and `drafters` drafters are connected.

    A gateway with keys does not show its drafters, so they are not waited for. Calls `show` with
    each new state of the start. `ca` has the authority of the gateway's certificate.
    """
    shown = ""
    verify = True if ca is None else ssl.create_default_context(cafile=str(ca))
    async with httpx.AsyncClient(base_url=url, timeout=5, verify=verify) as client:
        while True:
            state, ready = await _state(client, drafters)
            if ready:
                return
            if state not in ("", shown):
                show(state)
                shown = state
            await asyncio.sleep(_POLL_S)


async def _state(client: httpx.AsyncClient, drafters: int) -> tuple[str, bool]:
    """The state of the start, "" if it is not known yet, and whether the stack serves."""
    try:
        body = (await client.get("/readyz")).json()
    except (httpx.TransportError, ValueError):
        return "", False
    status = body["status"]
    if status == "unavailable":
        # The verifier does not listen yet. If it never will, its process ends and says why.
        return "", False
    if status == "loading":
        loading = (v for v in body["verifiers"] if not v["ready"])
        return "; ".join(f"loading {v['model']}: {v['stage_detail']}" for v in loading), False
    if status not in ("ready", "degraded"):
        return f"{status}: {body['detail']}", False
    if not body["verifiers"]:
        return "", True
    connected = sum(d["connected"] for v in body["verifiers"] for d in v["drafters"])
    return f"waiting for {drafters - connected} of {drafters} drafters", connected >= drafters


@dataclass(frozen=True, slots=True)
class Answer:
    """A completion's text and statistics.

    `speculative` is the answer's `metrics.speculative_decoding`, None for plain decoding.
    """

    text: str
    token_count: int
    seconds: float
    speculative: dict[str, Any] | None


async def complete(
    client: httpx.AsyncClient, model: str, prompt: str, max_tokens: int, speculation: dict[str, Any]
) -> Answer:
    """Request one greedy completion, and time it.

    Raises httpx.HTTPStatusError with the server's message if the server refuses the request.
    """
    clock = asyncio.get_running_loop().time
    started = clock()
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
    seconds = clock() - started
    speculative = (answer.get("metrics") or {}).get("speculative_decoding")
    return Answer(
        answer["choices"][0]["text"], answer["usage"]["completion_tokens"], seconds, speculative
    )
