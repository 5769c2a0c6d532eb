"""Two versions of Outrider side by side: their processes, and clients that keep the texts."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import httpx

from outrider.process.network.ports import free_port
from outrider_bench.chaos.requests import COUNT, Answer, body
from tests.stack import DRAFT, TARGET, Process
from tests.waiting import until

FAMILIES = ("ngram", "model")
PLAIN: Mapping[str, Any] = {"enabled": False}
_AT_ONCE = 6
_DRAIN_S = 60.0
_START_S = 600.0  # eight processes start at once
_TRIES = 200
_PAUSE_S = 0.1
_MODEL = ("--dtype", "float32", "--threads", "1")

Choices = dict[str, tuple[str, str | None]]
"""The text and finish reason of each choice of an answer, keyed by index."""


@dataclass(frozen=True)
class Version:
    """A version of Outrider: its role in the test, its number, and the Python that has it."""

    name: str
    number: str
    python: Path

    @property
    def site(self) -> Path:
        """The folder in which it is installed."""
        [found] = self.python.parents[1].glob("lib/python*/site-packages")
        return found

    def start(self, module: str, *arguments: str) -> Process:
        """Start a module of this version. -P keeps the working directory off Python's path."""
        return Process(module, *arguments, command=(str(self.python), "-P", "-m", module))

    def copy(self, folder: Path) -> Version:
        """Return another environment with the same files, for a change in them."""
        shutil.copytree(self.python.parents[1], folder, symlinks=True)
        return Version(self.name, self.number, folder / "bin/python")

    def change(self, file: str, pattern: str, replacement: str) -> None:
        """Replace each match of a pattern in an installed file, which must have one."""
        path = self.site / file
        text, count = re.subn(pattern, lambda _: replacement, path.read_text())
        assert count, f"{file} has nothing that matches {pattern}"
        path.write_text(text)
        # Python takes compiled code to be current if the source has the same size, and the same
        # time in seconds.
        shutil.rmtree(path.parent / "__pycache__")


@dataclass
class Reply:
    """What a client got for a request, and how often a gateway turned the request away."""

    number: int
    answer: Answer = field(default_factory=Answer)
    accepted: int = 0
    turned_away: int = 0

    @property
    def error(self) -> str:
        """Why the answer is not whole; "" if it is."""
        return self.answer.code or "; ".join(self.answer.problems)

    @property
    def choices(self) -> Choices:
        """The answer's texts."""
        return {key: (each.text, each.reason) for key, each in self.answer.choices.items()}

    async def read(self, response: httpx.Response) -> None:
        """Read an answer to its end."""
        if response.is_error:
            self.answer.fail(json.loads(await response.aread()))
            return
        async for line in response.aiter_lines():
            self.answer.add(line)
            if '"speculative_decoding"' in line:
                metrics = json.loads(line.removeprefix("data: "))["metrics"]
                drafts = metrics["speculative_decoding"] or {}  # None if there were no drafts
                self.accepted = drafts.get("num_accepted_draft_tokens", 0)
        if not self.answer.is_done:
            self.answer.problems.append("the stream ended early")


async def ask(urls: Sequence[str], number: int, speculation: Mapping[str, Any]) -> Reply:
    """Send a gateway a request of the fault campaigns; return the reply.

    Like a load balancer, the function tries the next gateway if a gateway takes no connection, or
    refuses the request because it leaves. A request that a gateway has begun to answer is never
    sent again.
    """
    reply = Reply(number)
    sent = body(number) | {"speculation": dict(speculation)}
    async with httpx.AsyncClient(timeout=120, trust_env=False) as client:
        for url in itertools.islice(itertools.cycle(urls), _TRIES):
            has_begun = False
            try:
                async with client.stream("POST", f"{url}/v1/completions", json=sent) as response:
                    if response.status_code != httpx.codes.SERVICE_UNAVAILABLE or len(urls) == 1:
                        has_begun = True
                        await reply.read(response)
                        return reply
            except httpx.TransportError as error:
                if has_begun:
                    reply.answer.problems.append(repr(error))
                    return reply
            reply.turned_away += 1
            await asyncio.sleep(_PAUSE_S)
    reply.answer.problems.append("no gateway took the request")
    return reply


async def ask_all(
    urls: Sequence[str], numbers: Iterable[int], speculation: Callable[[int], Mapping[str, Any]]
) -> list[Reply]:
    """Send these requests, some at a time; return their replies."""
    turns = asyncio.Semaphore(_AT_ONCE)

    async def take_turn(number: int) -> Reply:
        async with turns:
            return await ask(urls, number, speculation(number))

    return await asyncio.gather(*map(take_turn, numbers))


async def plain_texts(urls: Sequence[str], numbers: Iterable[int]) -> dict[int, Choices]:
    """Return the texts of plain decoding, each of which must come whole."""
    replies = await ask_all(urls, numbers, lambda _: PLAIN)
    assert [reply.error for reply in replies if reply.error] == []
    return {reply.number: reply.choices for reply in replies}


def drafted(number: int) -> dict[str, Any]:
    """Ask for drafts in each step. Every kind of request gets drafts of both families."""
    family = FAMILIES[number // 10 % len(FAMILIES)]
    return {"drafter_family": family, "always_draft": True, "metrics": True}


class Load:
    """Clients that stream requests through some gateways until the block ends."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.replies: list[Reply] = []
        self._urls = urls
        self._numbers = itertools.count()
        self._is_over = False
        self._clients: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._clients = [asyncio.create_task(self._stream()) for _ in range(_AT_ONCE)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_over = True
        await asyncio.gather(*self._clients)

    async def _stream(self) -> None:
        while not self._is_over:
            number = next(self._numbers) % COUNT
            first = number % len(self._urls)
            urls = [*self._urls[first:], *self._urls[:first]]
            # A request that names a family is refused while the family's only drafter is replaced.
            speculation = {"always_draft": True, "metrics": True}
            self.replies.append(await ask(urls, number, speculation))

    async def more(self, count: int) -> None:
        """Wait until `count` further requests have ended."""
        wanted = len(self.replies) + count
        await until(lambda: len(self.replies) >= wanted, _START_S)


class Stack:
    """Verifiers, gateways and drafters, keyed by name, each of some version."""

    def __init__(self) -> None:
        self.verifiers: dict[str, str] = {}
        """The address of each verifier."""
        self.gateways: dict[str, str] = {}
        """The URL of each gateway."""
        self._starts: dict[str, Callable[[Version], Process]] = {}
        self._running: dict[str, tuple[Version, Process]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for _, process in self._running.values():
            process.kill()
            process.log.close()

    def _add(self, name: str, version: Version, start: Callable[[Version], Process]) -> None:
        self._starts[name] = start
        self._running[name] = version, start(version)

    def add_verifier(self, name: str, version: Version) -> None:
        """Start a verifier that gives its answers a minute when it has to leave."""
        self.verifiers[name] = f"127.0.0.1:{free_port()}"
        words = ["--target", TARGET, *_MODEL, "--listen", self.verifiers[name]]
        words += ["--drain-seconds", str(_DRAIN_S)]
        self._add(name, version, lambda version: version.start("verifier_svc", *words))

    def add_gateway(self, name: str, version: Version, *verifiers: str) -> None:
        """Start a gateway of some verifiers."""
        port, grpc_port = free_port(), free_port()
        self.gateways[name] = f"http://127.0.0.1:{port}"
        words = [*self._dialled(verifiers), "--tokenizer", TARGET]
        words += ["--http-port", str(port), "--grpc-listen", f"127.0.0.1:{grpc_port}"]
        words += ["--drain-seconds", str(_DRAIN_S)]
        self._add(name, version, lambda version: version.start("gateway", *words))

    def add_drafters(self, version: Version) -> None:
        """Start a drafter of each family, for all verifiers."""
        for family in FAMILIES:
            words = [*self._dialled(self.verifiers), "--family", family]
            words += ["--model", DRAFT, *_MODEL] if family == "model" else []

            def start(version: Version, family: str = family, words: list[str] = words) -> Process:
                return version.start("drafter_svc", *words, "--id", f"{family}-{version.name}")

            self._add(family, version, start)

    def _dialled(self, verifiers: Iterable[str]) -> list[str]:
        return [word for name in verifiers for word in ("--verifier", self.verifiers[name])]

    async def stop(self, *names: str) -> None:
        """Send SIGTERM, and wait until the processes have drained and ended with status 0."""
        for name in names:
            _, process = self._running.pop(name)
            status = await asyncio.to_thread(process.stop, _DRAIN_S)
            assert status == 0, process.output()
            process.log.close()

    async def replace(self, name: str, version: Version) -> None:
        """Stop a process, start it in another version, and wait until the stack is complete."""
        await self.stop(name)
        self._running[name] = version, self._starts[name](version)
        await self.ready()

    async def ready(self, *gateways: str) -> None:
        """Wait until these gateways, or all, are ready and see their verifiers and all drafters."""
        urls = [self.gateways[name] for name in gateways or self.gateways]
        async with httpx.AsyncClient(timeout=5, trust_env=False) as client:

            async def is_complete() -> bool:
                for _, process in self._running.values():
                    assert process.popen.poll() is None, process.output()
                return all([await self._sees_all(client, url) for url in urls])

            await until(is_complete, _START_S)

    async def _sees_all(self, client: httpx.AsyncClient, url: str) -> bool:
        drafters = {
            f"{name}-{self._running[name][0].name}" for name in FAMILIES if name in self._running
        }
        numbers = {at: self._running[name][0].number for name, at in self.verifiers.items()}
        states: list[dict[str, Any]] = []
        with suppress(httpx.TransportError):
            states = (await client.get(f"{url}/readyz")).json()["verifiers"]
        return bool(states) and all(
            state["ready"]
            and state["version"] == numbers[state["address"]]
            and {each["id"] for each in state["drafters"] if each["connected"]} == drafters
            for state in states
        )
