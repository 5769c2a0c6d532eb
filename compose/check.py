"""Checks a stack of containers from outside.

`check.py requests` sends one request of each kind. `check.py plain FILE` writes the texts of plain
decoding to FILE. `check.py crash FILE FAMILY CONTAINER` kills a container under load, `check.py
scale FILE SERVICE` scales and updates a swarm's verifiers under load, and `check.py update FILE
VERSION COUNT COMMAND...` runs a command under load that gives gateway and verifiers another
version. `crash`, `scale` and `update` compare all texts with those in FILE. OUTRIDER_URL is the
gateway's URL, and OUTRIDER_API_KEY a key if the gateway wants one. `check.py rights LABEL` sends no
requests: it checks the users, rights and root file systems of the running containers with a label.

Each command prints one line "note: " with its result. If a check fails, the command prints one
sentence and exits with status 1.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from outrider_cli.client import ask, until_ready
from outrider_cli.prompts import DEMO_PROMPTS

_STREAMS = 50
_TOKENS = 96
# So few tokens that, even on a busy machine, an answer ends within the 10 s in which a stopped
# process drains.
_FEW_TOKENS = 16
_CLIENTS = 4
_DRAFTERS = 3
_BACK_S = 60.0
_UPDATED_S = 180.0
_AGAIN_S = 0.2
_PLAIN = {"enabled": False}
# Each prompt begins with its own line, so that no two share a page of the prefix cache.
_PROMPTS = [f"# {index}\n{DEMO_PROMPTS[index % len(DEMO_PROMPTS)][1]}" for index in range(_STREAMS)]


class CheckFailed(Exception):
    """A check failed; the text says which and why."""


class Refused(CheckFailed):
    """The gateway did not take the request."""


class Load:
    """Sends 50 streaming requests, all at once or repeatedly; collects texts and finish reasons."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        model: str,
        speculation: dict[str, Any],
        tokens: int = _TOKENS,
    ) -> None:
        self._client = client
        self._model = model
        self._speculation = speculation
        self._tokens = tokens
        self.texts = [""] * _STREAMS
        self.reasons = [""] * _STREAMS
        self.accepted = 0
        self.refused: list[tuple[float, Refused]] = []
        """When requests were refused, in seconds of the monotonic clock, and the errors."""
        self.halfway = asyncio.Event()

    async def run(self) -> None:
        """Send all requests at once, and wait until the last one has ended."""
        await asyncio.gather(*map(self._stream, range(_STREAMS)))

    async def repeat(self, expected: list[str], until: asyncio.Event) -> int:
        """Send the requests repeatedly, one at a time for each client; return how many were sent.

        Each request must complete with its expected text, or with the beginning of this text if it
        asked for fewer tokens. Like OpenAI's clients, these clients send a request again if the
        gateway did not take it.
        """
        clients = (self._repeat(client, expected, until) for client in range(_CLIENTS))
        return sum(await asyncio.gather(*clients))

    async def _repeat(self, client: int, expected: list[str], until: asyncio.Event) -> int:
        for count, index in enumerate(itertools.cycle(range(client, _STREAMS, _CLIENTS))):
            if until.is_set():
                return count
            self.texts[index] = self.reasons[index] = ""
            while not await self._is_taken(index):  # noqa: ASYNC110
                await asyncio.sleep(_AGAIN_S)
            text, reason = self.texts[index], self.reasons[index]
            is_right = text and expected[index].startswith(text)
            if self._tokens == _TOKENS:
                is_right = text == expected[index]
            if not is_right or reason != "length":
                found = f"{text!r} ({reason or 'cut off'})"
                raise CheckFailed(f"request {index} is {found}, not {expected[index]!r}")
        raise AssertionError("a cycle has no end")

    async def _is_taken(self, index: int) -> bool:
        """Send a request; return False if the gateway did not take it."""
        try:
            await self._stream(index)
        except Refused as refusal:
            self.refused.append((time.monotonic(), refusal))
            return False
        return True

    async def _stream(self, index: int) -> None:
        """Send a request and read its answer; raise Refused if the gateway does not take it."""
        body = {
            "model": self._model,
            "prompt": _PROMPTS[index],
            "max_tokens": self._tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        body |= {"stream": True, "speculation": self._speculation}
        async with self._taken(body) as response:
            if response.is_error:
                text = (await response.aread()).decode()
                raise CheckFailed(f"request {index}: {response.status_code} {text}")
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    self._take(index, json.loads(line.removeprefix("data: ")))

    @asynccontextmanager
    async def _taken(self, body: dict[str, Any]) -> AsyncIterator[httpx.Response]:
        """Send a request; yield the response once it begins, or raise Refused."""
        request = self._client.build_request("POST", "/v1/completions", json=body)
        try:
            response = await self._client.send(request, stream=True)
        except httpx.TransportError as error:
            raise Refused(repr(error)) from error
        try:
            if response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
                raise Refused((await response.aread()).decode())
            yield response
        finally:
            await response.aclose()

    def _take(self, index: int, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            raise CheckFailed(f"request {index}: {chunk['error']}")
        for choice in chunk["choices"]:
            self.texts[index] += choice["text"]
            self.reasons[index] = choice["finish_reason"] or ""
        # A token has more than two characters on average, so at this length fewer than half of the
        # tokens are there.
        if all(self.texts) and sum(map(len, self.texts)) >= _STREAMS * _TOKENS:
            self.halfway.set()
        speculative = (chunk.get("metrics") or {}).get("speculative_decoding") or {}
        self.accepted += speculative.get("num_accepted_draft_tokens", 0)


async def requests(client: httpx.AsyncClient, model: str) -> str:
    """Request completions, a chat and the metrics.

    The gateway must be ready and not degraded. With each family the text must equal the text of
    plain decoding.
    """
    state = (await client.get("/readyz")).raise_for_status().json()
    if state["status"] != "ready":
        raise CheckFailed(f"the gateway is {state['status']}: {state['detail']}")
    question = {"model": model, "prompt": _PROMPTS[0]}
    plain = await ask(client, question, _TOKENS, _PLAIN)
    for family in ("ngram", "model"):
        speculation = {"drafter_family": family, "metrics": True}
        answer = await ask(client, question, _TOKENS, speculation)
        if answer.text != plain.text:
            raise CheckFailed(f"with {family} the text is {answer.text!r}, not {plain.text!r}")
    message = {"role": "user", "content": "List the items as JSON: Order: 3 x lamp at 12.5."}
    body = {"model": model, "messages": [message], "max_tokens": 64}
    chat = (await client.post("/v1/chat/completions", json=body)).raise_for_status().json()
    if not chat["choices"][0]["message"]["content"]:
        raise CheckFailed(f"the chat is empty: {chat}")
    metrics = (await client.get("/metrics")).raise_for_status().text
    if "outrider" not in metrics:
        raise CheckFailed("the gateway's metrics have none of Outrider's")
    return f"{plain.token_count} tokens plain in {plain.seconds:.2f} s"


async def plain(client: httpx.AsyncClient, model: str, keep: Callable[[str], object]) -> str:
    """Pass the texts of plain decoding to `keep`, as JSON."""
    load = Load(client, model, _PLAIN)
    began = time.monotonic()
    await load.run()
    keep(json.dumps(load.texts))
    rate = _STREAMS * _TOKENS / (time.monotonic() - began)
    return f"{_STREAMS} streams at once, {rate:.0f} tokens/s"


async def crash(
    client: httpx.AsyncClient, model: str, expected: list[str], family: str, container: str
) -> str:
    """Kill a container while all requests stream.

    The requests must complete with plain decoding's texts, and all drafters must come back.
    """
    load = Load(client, model, {"drafter_family": family, "metrics": True})
    running = asyncio.create_task(load.run())
    halfway = asyncio.create_task(load.halfway.wait())
    await asyncio.wait((running, halfway), return_when=asyncio.FIRST_COMPLETED)
    under_way = load.reasons.count("")
    _docker("kill", container)
    killed = time.monotonic()
    if under_way == 0:
        raise CheckFailed("all requests had ended before the kill")
    await running
    same = sum(a == b for a, b in zip(load.texts, expected, strict=True))
    if same != _STREAMS or load.reasons.count("length") != _STREAMS:
        reasons = set(load.reasons)
        raise CheckFailed(f"{same} of {_STREAMS} texts are plain decoding's; reasons: {reasons}")
    restarted_by = await _restarted(container)
    async with asyncio.timeout(_BACK_S):
        await until_ready(str(client.base_url), print, _DRAFTERS)
    back = f"back by {restarted_by} after {time.monotonic() - killed:.0f} s"
    return f"{under_way} under way, {same} equal, {load.accepted} accepted, {back}"


async def scale(client: httpx.AsyncClient, model: str, expected: list[str], service: str) -> str:
    """Scale a swarm's verifiers from 2 to 3 to 1 and update them while requests stream.

    All requests must complete with plain decoding's texts. Few requests have to move to another
    verifier: Swarm takes a task's address away two seconds before it sends SIGTERM.
    """
    load = Load(client, model, {"metrics": True})
    await _have_verifiers(client, 2)

    async def change() -> None:
        for count in (3, 1):
            await asyncio.to_thread(_docker, "service", "scale", f"{service}={count}")
            await _have_verifiers(client, count)
        await asyncio.to_thread(_docker, "service", "update", "--force", service)
        await _have_verifiers(client, 1)

    note = await _under_load(load, expected, change())
    if load.refused:
        raise CheckFailed(f"{len(load.refused)} requests were refused: {load.refused[0][1]}")
    metrics = (await client.get("/metrics")).raise_for_status().text
    samples = re.findall(r"^outrider:request_resumed_total\{.*\} (\S+)$", metrics, re.MULTILINE)
    return f"{note}, {sum(map(float, samples)):.0f} moved to another verifier"


async def update(
    client: httpx.AsyncClient,
    model: str,
    expected: list[str],
    wanted: str,
    count: int,
    *command: str,
) -> str:
    """Run a command while requests stream, until gateway and verifiers have the wanted version.

    All answers that have begun must complete with plain decoding's texts. The gateway of a stack on
    one machine has no other gateway beside it, so requests are refused while it restarts.
    """
    load = Load(client, model, {"metrics": True}, _FEW_TOKENS)

    async def change() -> None:
        run = partial(subprocess.run, command, check=True, stdout=sys.stderr)
        await asyncio.to_thread(run)
        async with asyncio.timeout(_UPDATED_S):
            while await _versions(client) != [wanted] * (1 + count):  # noqa: ASYNC110
                await asyncio.sleep(_AGAIN_S)

    note = await _under_load(load, expected, change())
    gap = load.refused[-1][0] - load.refused[0][0] if load.refused else 0.0
    return f"{note}, new ones refused for {gap:.0f} s"


async def _under_load(load: Load, expected: list[str], change: Coroutine[Any, Any, None]) -> str:
    """Make a change while requests are sent again and again; return a note on the requests."""
    began = time.monotonic()
    finish = asyncio.Event()
    traffic = asyncio.create_task(load.repeat(expected, finish))
    changes = asyncio.create_task(change)
    await asyncio.wait((traffic, changes), return_when=asyncio.FIRST_COMPLETED)
    finish.set()
    count = await traffic
    await changes
    seconds = time.monotonic() - began
    return f"{count} requests in {seconds:.0f} s, all equal, {load.accepted} tokens accepted"


async def _versions(client: httpx.AsyncClient) -> list[str]:
    """Return the versions of the gateway and of its ready verifiers; [] while it is away."""
    try:
        gateway = (await client.get("/version")).raise_for_status().json()["version"]
        verifiers = (await client.get("/readyz")).json()["verifiers"]
    except (httpx.HTTPError, ValueError):
        return []
    return [gateway, *(each["version"] for each in verifiers if each["ready"])]


async def _have_verifiers(client: httpx.AsyncClient, count: int) -> None:
    """Wait until the gateway lists exactly this number of verifiers, and all are ready."""
    async with asyncio.timeout(_BACK_S):
        while True:
            state = (await client.get("/readyz")).json()
            ready = [verifier["ready"] for verifier in state.get("verifiers", ())]
            if ready == [True] * count:
                return
            await asyncio.sleep(0.2)


async def _restarted(container: str) -> str:
    """Wait for a killed container's restart; return whether "policy" or "start" restarted it.

    Some engines do not apply the restart policy after `docker kill`; there `docker start` is used.
    """
    await asyncio.sleep(3)
    if _docker("inspect", "--format", "{{.State.Running}}", container) == "true":
        return "policy"
    _docker("start", container)
    return "start"


def rights(label: str) -> str:
    """Check every process of the containers with a label, as the kernel describes it.

    A swarm cannot keep its processes from gaining rights, so there this is not checked.
    """
    is_swarm = label.startswith("com.docker.stack.")
    running = "ps", "--quiet", "--filter", f"label={label}"
    containers = _docker(*running).split()
    count = 0
    for container in containers[:]:
        try:
            name = _docker("inspect", "--format", "{{.Name}}", container)
            # The first line is a heading.
            pids = _docker("top", container, "-eo", "pid").split()[1:]
        except subprocess.CalledProcessError:
            # A container that an update has replaced may have stopped meanwhile.
            if container in _docker(*running).split():
                raise
            containers.remove(container)
            continue
        for pid in pids:
            if wrong := _excess(Path("/proc", pid), may_gain=is_swarm):
                raise CheckFailed(f"{name}, process {pid}: {', '.join(wrong)}")
            count += 1
    if not containers or count < len(containers):
        raise CheckFailed(f"{count} processes in {len(containers)} containers of {label}")
    return f"{count} processes in {len(containers)} containers"


def _excess(process: Path, *, may_gain: bool) -> list[str]:
    """Return the rights that a process has but no service needs, from its folder in /proc."""
    lines = (process / "status").read_text().splitlines()
    status = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
    mounts = [line.split() for line in (process / "mountinfo").read_text().splitlines()]
    root = next(mount[5].split(",") for mount in reversed(mounts) if mount[4] == "/")
    facts = {
        "it runs as root": "0" in status["Uid"],
        "it has capabilities": any(int(status[set_][0], 16) for set_ in ("CapPrm", "CapBnd")),
        "it may gain rights": status["NoNewPrivs"] != ["1"] and not may_gain,
        "its root file system can be written": "ro" not in root,
    }
    return [fact for fact, holds in facts.items() if holds]


def _docker(*arguments: str) -> str:
    command = ["docker", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _read(file: str) -> list[str]:
    texts: list[str] = json.loads(Path(file).read_text())
    return texts


async def main(command: str, *arguments: str) -> str:
    """Run one command, and return its note."""
    if command == "rights":
        return rights(arguments[0])
    url = os.environ["OUTRIDER_URL"]
    key = os.environ.get("OUTRIDER_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(
        base_url=url, headers=headers, timeout=180, limits=httpx.Limits()
    ) as client:
        model = (await client.get("/v1/models")).raise_for_status().json()["data"][0]["id"]
        if command == "requests":
            return await requests(client, model)
        if command == "plain":
            return await plain(client, model, Path(arguments[0]).write_text)
        if command == "scale":
            return await scale(client, model, _read(arguments[0]), arguments[1])
        if command == "update":
            version, count, *words = arguments[1:]
            return await update(client, model, _read(arguments[0]), version, int(count), *words)
        return await crash(client, model, _read(arguments[0]), *arguments[1:])


if __name__ == "__main__":
    try:
        print(f"note: {asyncio.run(main(*sys.argv[1:]))}")
    except (CheckFailed, TimeoutError, httpx.HTTPError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"{' '.join(sys.argv[1:2])}: {type(error).__name__}: {error}") from error
