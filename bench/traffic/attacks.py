"""Attack a running stack with two keys, and print how late another tenant's answers are.

    python bench/traffic/attacks.py --keys VICTIM ATTACKER ATTACKER --stack PID guard_bomb n64

PID is the process of `outrider serve`. The victim reads plain answers of 50 tokens, one after the
other, or --at-once of them side by side. It also asks for answers with new grammars, half a second
after the last such answer. The attackers run in a separate process. Each attack runs for 12 s.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import multiprocessing
import os
import signal
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import httpx

from outrider.v1 import drafts_pb2, verifier_pb2, verifier_pb2_grpc

ATTACK_S = 12.0
GUARD = "(?:a?){29}a{29}|x"
COMPILE = "([a-z ]{0,100}x?){1,100}" * 30
STEP = "root ::= s\ns ::= s s | s s s | [a-z] | [a-z] [a-z]"


class Attacker:
    """Sends one attacker's requests to the stack, with the attacker's key."""

    def __init__(self, given: argparse.Namespace, key: str) -> None:
        self.given = given
        limits = httpx.Limits(max_connections=None)
        self.http = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{given.port}",
            headers={"authorization": f"Bearer {key}"},
            timeout=120.0,
            limits=limits,
        )
        self.name = key[:3] + key[-6:]
        self.ends: Counter[str] = Counter()

    async def complete(self, **body: Any) -> None:
        answer = await self.http.post("/v1/completions", json={"prompt": "a", **body})
        error = answer.json().get("error") or {}
        self.ends[f"{answer.status_code} {error.get('code', '')}".strip()] += 1

    async def patterns(self, pattern: str) -> None:
        """Ask for many grammars, two at a time."""

        async def ask(name: str) -> None:
            for number in itertools.count():
                regex = f"{pattern}{name}{number}"
                await self.complete(max_tokens=2, structured_outputs={"regex": regex})

        await asyncio.gather(ask("a"), ask("b"))

    async def masks(self) -> None:
        async def ask() -> None:
            while True:
                await self.complete(max_tokens=60, structured_outputs={"grammar": STEP})

        await asyncio.gather(*[ask() for _ in range(2)])

    async def choices(self) -> None:
        await self.complete(prompt="def f(x):", max_tokens=1900, n=64, ignore_eos=True)

    async def events(self, count: int) -> None:
        """Read /events `count` / 2 times at once, after 150 drafters have joined and left."""

        async def read() -> None:
            async with self.http.stream("GET", "/events") as answer:
                self.ends[str(answer.status_code)] += 1
                async for _ in answer.aiter_raw():
                    pass

        async with self._verifier() as (stub, info):
            for number in range(150):
                call = await self._join(stub, info, f"{self.name}-{number}".ljust(100, "x"))
                with suppress(grpc.aio.AioRpcError):
                    await call.read()
                call.cancel()
        await asyncio.gather(*[read() for _ in range(count // 2)])

    async def skips(self) -> None:
        """Run eight drafters that answer each verdict with ten messages of 4,096 skips."""
        async with self._verifier() as (stub, info):
            names = [f"{self.name}-{number}" for number in range(8)]
            await asyncio.gather(*[self._flood(stub, info, name) for name in names])

    @asynccontextmanager
    async def _verifier(self) -> AsyncIterator[tuple[Any, verifier_pb2.GetModelResponse]]:
        """Yield the verifier's stub, and its answer to GetModel."""
        address = f"127.0.0.1:{self.given.verifier_port}"
        async with grpc.aio.insecure_channel(address) as channel:
            stub = verifier_pb2_grpc.VerifierServiceStub(channel)
            yield stub, await stub.GetModel(verifier_pb2.GetModelRequest())

    async def _join(self, stub: Any, info: Any, name: str) -> Any:
        """The stream of a drafter that has said its Hello."""
        call = stub.StreamDrafts()
        hello = drafts_pb2.Hello(
            drafter_id=name,
            family=name,
            tokenizer_fingerprint=info.tokenizer_fingerprint,
            max_draft_tokens=8,
            distributions=[drafts_pb2.DRAFT_DISTRIBUTION_ONE_HOT],
        )
        await call.write(verifier_pb2.StreamDraftsRequest(hello=hello))
        return call

    async def _flood(self, stub: Any, info: Any, name: str) -> None:
        call = await self._join(stub, info, name)
        try:
            async for response in call:
                for verdict in response.step.verdicts:
                    skip = drafts_pb2.Skip(
                        sequence_id=verdict.sequence_id, base_length=verdict.committed_length
                    )
                    drafts = drafts_pb2.DraftBatch(skips=[skip] * 4096)
                    for _ in range(10):
                        await call.write(verifier_pb2.StreamDraftsRequest(drafts=drafts))
                        self.ends["message of 4,096 skips"] += 1
        except grpc.aio.AioRpcError as error:
            self.ends[f"stream ended: {error.code().name}"] += 1
        except asyncio.InvalidStateError:
            self.ends[f"stream ended: {(await call.code()).name}"] += 1

    async def kill(self) -> None:
        """Kill all grammar workers and the process that forks them, and ask for new grammars."""
        for pid in list(grammar_workers(self.given.stack)):
            self.ends["killed"] += 1
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await self.patterns("k")


def grammar_workers(stack: int) -> Iterator[int]:
    """Yield the descendants of process `stack` that compile grammars, or fork such processes."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    for pid in parents:
        with suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            above = pid
            while above in parents and above != stack:
                above = parents[above]
            if above == stack and b"grammar" in command and b"worker_process" in command:
                yield pid


ATTACKS: dict[str, Callable[[Attacker], Awaitable[None]]] = {
    "alone": lambda a: asyncio.sleep(ATTACK_S),
    "guard_bomb": lambda a: a.patterns(GUARD),
    "compile_bomb": lambda a: a.patterns(COMPILE),
    "step_bomb": lambda a: a.masks(),
    "n64": lambda a: a.choices(),
    "skips": lambda a: a.skips(),
    "events_100": lambda a: a.events(100),
    "events_400": lambda a: a.events(400),
    "kill": lambda a: a.kill(),
}


async def attack(given: argparse.Namespace, name: str) -> None:
    keys = given.keys[1:2] if name == "kill" else given.keys[1:]
    attackers = [Attacker(given, key) for key in keys]
    with suppress(TimeoutError):
        async with asyncio.timeout(ATTACK_S + 1.0):
            await asyncio.gather(*[ATTACKS[name](each) for each in attackers])
    print("  attackers:", dict(sum([each.ends for each in attackers], Counter())), flush=True)


async def plain(victim: Attacker, until: float) -> list[tuple[float, float]]:
    """Seconds to the first chunk and to the end of each answer."""
    found = []
    body = {"prompt": "def f(x):", "max_tokens": 50, "ignore_eos": True, "stream": True}
    while time.perf_counter() < until:
        began = time.perf_counter()
        first = 0.0
        async with victim.http.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: ") and not first:
                    first = time.perf_counter() - began
        found.append((first, time.perf_counter() - began))
    return found


async def grammars(victim: Attacker, until: float) -> tuple[Counter[str], list[float]]:
    """How requests with new grammars end, and how long they take."""
    seconds = []
    while time.perf_counter() < until:
        began = time.perf_counter()
        regex = f"v{time.time_ns()}[a-z]{{3}}"
        await victim.complete(max_tokens=4, structured_outputs={"regex": regex})
        seconds.append(time.perf_counter() - began)
        await asyncio.sleep(0.5)
    return victim.ends, seconds


async def measure(given: argparse.Namespace, name: str) -> None:
    attacking = multiprocessing.get_context("spawn").Process(target=begin, args=(given, name))
    attacking.start()
    await asyncio.sleep(3.0)  # meanwhile the process starts, and the attack begins
    until = time.perf_counter() + ATTACK_S - 3.0
    victim = Attacker(given, given.keys[0])
    reading = [plain(victim, until) for _ in range(given.at_once)]
    (ends, seconds), *read = await asyncio.gather(grammars(victim, until), *reading)
    answers = [answer for answers in read for answer in answers]
    whole = sorted(each for _, each in answers)
    print(
        f"{name}: load {os.getloadavg()[0]:.0f}; {len(whole)} answers of 50 tokens,"
        f" p50 {statistics.median(whole):.2f} s, largest {whole[-1]:.2f} s,"
        f" largest first token {max(first for first, _ in answers):.2f} s;"
        f" new grammars {dict(ends)}, p50 {statistics.median(seconds):.2f} s,"
        f" largest {max(seconds):.2f} s",
        flush=True,
    )
    await asyncio.to_thread(attacking.join)


def begin(given: argparse.Namespace, name: str) -> None:
    asyncio.run(attack(given, name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--verifier-port", type=int, default=50051)
    parser.add_argument("--stack", type=int, required=True)
    parser.add_argument("--keys", nargs=3, required=True, help="without a keys file, any words")
    parser.add_argument("--at-once", type=int, default=1, help="the victim's readers")
    parser.add_argument("attacks", nargs="+", choices=ATTACKS)
    given = parser.parse_args()
    for name in given.attacks:
        asyncio.run(measure(given, name))
        time.sleep(2.0)


if __name__ == "__main__":
    main()
