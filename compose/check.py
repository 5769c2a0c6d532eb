"""Checks a stack of containers from outside: one request of each kind, and crashes under load that must change no text.

`check.py requests`, `check.py plain FILE`, then `check.py crash FILE FAMILY CONTAINER`; OUTRIDER_URL is the gateway. `check.py
experiment FOLDER` looks at the results of `outrider experiment run` instead. A line that begins with "note: " says what was seen;
the exit status is 1, with a sentence, when something is not as it must be.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from outrider.launch.client import complete, until_ready
from outrider.launch.prompts import DEMO_PROMPTS

_STREAMS = 50
_TOKENS = 96
_DRAFTERS = 3
_BACK_S = 60.0
_PLAIN = {"enabled": False}
# Each with a line of its own, so that no two share a beginning and with it a page of the prefix cache.
_PROMPTS = [f"# {index}\n{DEMO_PROMPTS[index % len(DEMO_PROMPTS)][1]}" for index in range(_STREAMS)]


class Wrong(Exception):
    """Something is not as it must be; the text says what."""


class Load:
    """Streaming requests under way: the texts so far, and which have ended."""

    def __init__(self, client: httpx.AsyncClient, model: str, speculation: dict[str, Any]) -> None:
        self._client, self._model, self._speculation = client, model, speculation
        self.texts = [""] * _STREAMS
        self.reasons = [""] * _STREAMS
        self.accepted = 0
        self.halfway = asyncio.Event()

    async def run(self) -> None:
        """All requests at once, until the last has ended."""
        await asyncio.gather(*map(self._stream, range(_STREAMS)))

    async def _stream(self, index: int) -> None:
        body = {
            "model": self._model,
            "prompt": _PROMPTS[index],
            "max_tokens": _TOKENS,
            "temperature": 0,
            "ignore_eos": True,
        }
        body |= {"stream": True, "speculation": self._speculation}
        async with self._client.stream("POST", "/v1/completions", json=body) as response:
            if response.is_error:
                raise Wrong(
                    f"request {index}: {response.status_code} {(await response.aread()).decode()}"
                )
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    self._take(index, json.loads(line.removeprefix("data: ")))

    def _take(self, index: int, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            raise Wrong(f"request {index}: {chunk['error']}")
        for choice in chunk["choices"]:
            self.texts[index] += choice["text"]
            self.reasons[index] = choice["finish_reason"] or ""
        # A token has two characters and more.
        if all(self.texts) and sum(map(len, self.texts)) >= _STREAMS * _TOKENS:
            self.halfway.set()
        self.accepted += ((chunk.get("metrics") or {}).get("speculative_decoding") or {}).get(
            "num_accepted_draft_tokens", 0
        )


async def requests(client: httpx.AsyncClient, model: str) -> str:
    """A completion, a chat and the metrics; a drafter asked for gives the text that plain decoding gives, and none is missed."""
    state = (await client.get("/readyz")).raise_for_status().json()
    if state["status"] != "ready":
        raise Wrong(f"the gateway is {state['status']}: {state['detail']}")
    plain = await complete(client, model, _PROMPTS[0], _TOKENS, _PLAIN)
    for family in ("ngram", "model"):
        answer = await complete(
            client, model, _PROMPTS[0], _TOKENS, {"drafter": family, "metrics": True}
        )
        if answer.text != plain.text:
            raise Wrong(f"with {family} the text is {answer.text!r}, not {plain.text!r}")
    ask = {
        "model": model,
        "messages": [
            {"role": "user", "content": "List the items as JSON: Order: 3 x lamp at 12.5."}
        ],
    }
    chat = (
        (await client.post("/v1/chat/completions", json=ask | {"max_tokens": 64}))
        .raise_for_status()
        .json()
    )
    if not chat["choices"][0]["message"]["content"]:
        raise Wrong(f"the chat is empty: {chat}")
    metrics = (await client.get("/metrics")).raise_for_status().text
    if "outrider" not in metrics:
        raise Wrong("the gateway's metrics name nothing of Outrider's")
    return f"{plain.token_count} tokens plain in {plain.seconds:.2f} s"


async def plain(client: httpx.AsyncClient, model: str, keep: Callable[[str], object]) -> str:
    """Let `keep` have what plain decoding makes of the prompts, as JSON."""
    load = Load(client, model, _PLAIN)
    began = time.monotonic()
    await load.run()
    keep(json.dumps(load.texts))
    return f"{_STREAMS} streams at once, {_STREAMS * _TOKENS / (time.monotonic() - began):.0f} tokens/s"


async def crash(
    client: httpx.AsyncClient, model: str, expected: list[str], family: str, container: str
) -> str:
    """Kill a container while all requests stream; they must complete with plain decoding's texts, and all drafters come back."""
    load = Load(client, model, {"drafter": family, "metrics": True})
    running = asyncio.create_task(load.run())
    await asyncio.wait(
        (running, asyncio.create_task(load.halfway.wait())), return_when=asyncio.FIRST_COMPLETED
    )
    under_way = load.reasons.count("")
    _docker("kill", container)
    killed = time.monotonic()
    if under_way == 0:
        raise Wrong("all requests had ended before the kill")
    await running
    same = sum(a == b for a, b in zip(load.texts, expected, strict=True))
    if same != _STREAMS or load.reasons.count("length") != _STREAMS:
        raise Wrong(
            f"{same} of {_STREAMS} texts are plain decoding's; they ended with {set(load.reasons)}"
        )
    by = await _restarted(container)
    await asyncio.wait_for(until_ready(str(client.base_url), print, _DRAFTERS), _BACK_S)
    back = time.monotonic() - killed
    return f"{under_way} under way, {same} equal, {load.accepted} accepted, back by {by} after {back:.0f} s"


async def _restarted(container: str) -> str:
    """What brought the container back: its policy, or `docker start`, since engines may take `docker kill` for a wish."""
    await asyncio.sleep(3)
    if _docker("inspect", "--format", "{{.State.Running}}", container) == "true":
        return "policy"
    _docker("start", container)
    return "start"


def experiment(folder: Path) -> str:
    """Look at an experiment's results: no request failed, all texts are plain decoding's, and the link carried the drafts."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*/*/cells/*/*.json"))]
    errors = [error for measurement in found for error in measurement["errors"]]
    texts = {measurement["texts_sha256"] for measurement in found}
    carried = sum(
        link["up_bytes"] for measurement in found for link in measurement["links"].values()
    )
    if errors or len(texts) != 1 or carried == 0:
        raise Wrong(
            f"{len(found)} measurements, {len(texts)} different texts, {carried} bytes over links; errors: {errors[:3]}"
        )
    return f"{len(found)} measurements with equal texts, {carried} bytes over the link"


def _docker(*arguments: str) -> str:
    return subprocess.run(
        ["docker", *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


def _read(file: str) -> list[str]:
    texts: list[str] = json.loads(Path(file).read_text())
    return texts


async def main(command: str, *arguments: str) -> str:
    """Run one command; what it noted."""
    if command == "experiment":
        return experiment(Path(arguments[0]))
    async with httpx.AsyncClient(
        base_url=os.environ["OUTRIDER_URL"], timeout=180, limits=httpx.Limits()
    ) as client:
        model = (await client.get("/v1/models")).raise_for_status().json()["data"][0]["id"]
        if command == "requests":
            return await requests(client, model)
        if command == "plain":
            return await plain(client, model, Path(arguments[0]).write_text)
        return await crash(client, model, _read(arguments[0]), *arguments[1:])


if __name__ == "__main__":
    try:
        print(f"note: {asyncio.run(main(*sys.argv[1:]))}")
    except (Wrong, TimeoutError, httpx.HTTPError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"{' '.join(sys.argv[1:2])}: {type(error).__name__}: {error}") from error
