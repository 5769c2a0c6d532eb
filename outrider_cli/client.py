"""A client of the stack on this host, over HTTP: waits until it serves, and sends requests.

The command line uses this client; services do not.
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

    A gateway with keys does not show its drafters, so the call does not wait for them. Calls `show`
    with each new state of the start. `ca` is a file with the authority of the gateway's
    certificate.
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
    """Return the state of the start, "" if unknown, and whether the stack serves."""
    try:
        body = (await client.get("/readyz")).json()
    except (httpx.TransportError, ValueError):
        return "", False
    status = body["status"]
    if status == "unavailable":
        # The verifier does not listen yet. If the verifier never listens, its process ends and says
        # why.
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
    """An answer's text and statistics.

    `speculative` is the answer's `metrics.speculative_decoding`, None for plain decoding. `paused`
    says why at least half of the steps had no draft (docs/api.md); None if the answer does not say.
    """

    text: str
    token_count: int
    seconds: float
    speculative: dict[str, Any] | None
    paused: dict[str, Any] | None


async def ask(
    client: httpx.AsyncClient,
    question: dict[str, Any],
    max_tokens: int,
    speculation: dict[str, Any],
) -> Answer:
    """Request one greedy answer, and time it.

    `question` has the fields of a completion's body or, if it has `messages`, of a chat's body.
    Raises httpx.HTTPStatusError with the server's message if the server refuses the request.
    """
    clock = asyncio.get_running_loop().time
    started = clock()
    wanted = {"max_tokens": max_tokens, "temperature": 0, "speculation": speculation}
    is_chat = "messages" in question
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    response = await client.post(path, json=question | wanted)
    if response.is_error:
        raise httpx.HTTPStatusError(response.text, request=response.request, response=response)
    answer = response.json()
    seconds = clock() - started
    choice = answer["choices"][0]
    return Answer(
        choice["message"]["content"] if is_chat else choice["text"],
        answer["usage"]["completion_tokens"],
        seconds,
        (answer.get("metrics") or {}).get("speculative_decoding"),
        (answer.get("speculation") or {}).get("paused"),
    )
