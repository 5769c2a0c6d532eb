"""Starts Outrider's processes for tests, and a client of a verifier."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import grpc
import httpx

from outrider.process.network import rpc
from outrider.process.network.ports import free_port
from outrider.protocol.messages import (
    SamplingParams,
    SpeculationOptions,
    TokenChunk,
    TokenRequest,
)
from outrider.protocol.model_info import ModelInfo, Stage
from outrider.protocol.wire import model as wire_model
from outrider.protocol.wire import requests as wire_requests
from outrider.tokenizer import load_tokenizer
from outrider.v1 import verifier_pb2, verifier_pb2_grpc
from tests.raw_drafter import RawDrafter
from tests.waiting import until

ROOT = Path(__file__).parents[1]
TARGET = str(ROOT / "models/target")
DRAFT = str(ROOT / "models/draft")
# A stack starts within 20 s on a quiet machine, and within minutes beside a compiler.
START_S = 180.0


def prompt_texts() -> list[str]:
    """Return 40 prompts of the kinds on which the bundled pair was trained."""
    modules = (textwrap, json, inspect, asyncio.queues, asyncio.locks)
    sources = ["\n".join(inspect.getsource(module).splitlines()[20:]) for module in modules]
    code = [source[i * 500 : i * 500 + 40 + 60 * i] for source in sources for i in range(4)]
    rewrite = [
        f"{source[1000:1400]}\n\n# The same again:\n{source[1000:1060]}" for source in sources
    ]
    people = [
        f"Extract name, age, job and city as JSON: {name}, {30 + i}, works as a baker in Oslo."
        for i, name in enumerate(("Ada", "Ben", "Chen", "Dora", "Eli"))
    ]
    orders = [
        f"List the items as JSON: Order: {i} x lamp at 3.5, {i + 1} x rope at {i}."
        for i in range(1, 6)
    ]
    chats = [f"<|user|>{text}<|end|><|assistant|>" for text in (*people, *orders)]
    short = ["def ", "import os\n", "class A:\n    ", "    return ", "#"]
    return [*code, *rewrite, *chats, *short]


def prompts(every: int = 1) -> list[list[int]]:
    """Return the token ids of every `every`-th text."""
    tokenizer = load_tokenizer(TARGET)
    return [encoding.ids for encoding in tokenizer.encode_batch(prompt_texts()[::every])]


class Process:
    """One process of the stack, with its output in a file. The end of a `with` block stops it."""

    def __init__(self, module: str, *arguments: str, command: Sequence[str] = ()) -> None:
        """Run a module of this repository, or `command` for another program."""
        self.arguments = [*(command or (sys.executable, "-m", module)), *arguments]
        # The test or fixture that stops the process closes this file.
        self.log = tempfile.TemporaryFile()  # noqa: SIM115
        self.start()

    def start(self) -> None:
        """Start the process, or start it again."""
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        self.popen = subprocess.Popen(
            self.arguments,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self.log.close()

    def output(self) -> str:
        """Return everything that the process has printed."""
        self.log.seek(0)
        return self.log.read().decode(errors="replace")

    def kill(self) -> None:
        """Send SIGKILL, which acts like a crash."""
        self.popen.kill()
        self.popen.wait()

    def stop(self, timeout_s: float = 15.0) -> int:
        """Send SIGTERM, and return the exit status."""
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGTERM)
        try:
            return self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"{self.arguments} did not stop:\n{self.output()}") from None


class GatewayProcess(Process):
    """A gateway in front of the verifiers at these addresses."""

    def __init__(self, *verifiers: str, flags: Sequence[str] = (), tokenizer: str = TARGET) -> None:
        port, grpc_port = free_port(), free_port()
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.grpc_address = f"127.0.0.1:{grpc_port}"
        dialled = [word for address in verifiers for word in ("--verifier", address)]
        ports = ["--http-port", str(port), "--grpc-listen", self.grpc_address]
        super().__init__("gateway", *dialled, "--tokenizer", tokenizer, *ports, *flags)

    def wait_ready(self, timeout_s: float = 60.0) -> None:
        """Wait until all verifiers serve, and until the gateway reports them as ready."""
        deadline = time.monotonic() + timeout_s
        states: dict[str, Any] = {}
        # The gateway is degraded as long as it misses a drafter that an earlier test has stopped.
        while states.get("status") not in ("ready", "degraded") or not all(
            verifier["ready"] for verifier in states["verifiers"]
        ):
            assert self.popen.poll() is None, self.output()
            assert time.monotonic() < deadline, f"{states} after {timeout_s} s:\n{self.output()}"
            time.sleep(0.1)
            with suppress(httpx.TransportError):
                states = httpx.get(f"{self.url}/readyz").json()

    def close(self) -> None:
        """Stop the gateway, and drop its output."""
        self.stop()
        self.log.close()


class Stack:
    """A verifier, with the bundled target or another, and its drafters, keyed by name."""

    def __init__(
        self,
        *verifier_flags: str,
        module: str = "verifier_svc",
        target: str = TARGET,
        dtype: str = "float32",
    ) -> None:
        """`module` is the Python module of the verifier."""
        self.address = f"127.0.0.1:{free_port()}"
        # One thread: OpenMP's threads meet at barriers, which cost more than they gain on a machine
        # that is busy with tests.
        flags = ["--dtype", dtype, "--threads", "1", "--listen", self.address, *verifier_flags]
        self.verifier = Process(module, "--target", target, *flags)
        self.drafters: dict[str, Process] = {}

    def add_drafter(self, name: str, family: str, *flags: str) -> None:
        """Start a drafter; the family `model` gets the bundled draft model in float32."""
        arguments = ["--family", family, "--verifier", self.address, "--id", name]
        if family == "model":
            arguments += ["--model", DRAFT, "--dtype", "float32", "--threads", "1"]
        self.drafters[name] = Process("drafter_svc", *arguments, *flags)

    def wait_ready(self, timeout_s: float = START_S) -> ModelInfo:
        """Wait until the target is loaded and every drafter is connected."""
        processes = (self.verifier, *self.drafters.values())
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for process in processes:
                assert process.popen.poll() is None, process.output()
            info = self._model()
            if info is not None and info.stage is Stage.READY:
                connected = {drafter.drafter_id for drafter in info.drafters if drafter.connected}
                if connected >= set(self.drafters):
                    return info
            time.sleep(0.1)
        outputs = "\n".join(process.output() for process in processes)
        raise AssertionError(f"not ready after {timeout_s} s:\n{outputs}")

    def _model(self) -> ModelInfo | None:
        with grpc.insecure_channel(self.address) as channel:
            stub = verifier_pb2_grpc.VerifierServiceStub(channel)
            try:
                response = stub.GetModel(verifier_pb2.GetModelRequest(), timeout=10)
            except grpc.RpcError:
                return None
        return wire_model.model_from_proto(response)

    def stop(self) -> None:
        """Stop all processes; each must end on SIGTERM."""
        for process in (*self.drafters.values(), self.verifier):
            process.stop()
            process.log.close()


@dataclass
class Answers:
    """The texts of several requests, and the sums of their statistics."""

    texts: list[list[int]] = field(default_factory=list)
    forward_count: int = 0
    draft_token_count: int = 0
    accepted_token_count: int = 0

    @property
    def acceptance_rate(self) -> float:
        return self.accepted_token_count / max(self.draft_token_count, 1)

    def add(self, chunks: Sequence[TokenChunk]) -> None:
        """Count one more answer."""
        self.texts.append([token for chunk in chunks for token in chunk.token_ids])
        stats = chunks[-1].stats
        assert stats is not None
        self.forward_count += stats.forward_count
        self.draft_token_count += stats.draft_token_count
        self.accepted_token_count += stats.accepted_token_count


class Client:
    """A gRPC client of one verifier; use as an async context manager."""

    def __init__(self, address: str) -> None:
        self.channel = rpc.dial(address)
        self.stub = verifier_pb2_grpc.VerifierServiceStub(self.channel)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close(None)

    async def model(self) -> ModelInfo:
        """Return the verifier's model, with its drafters."""
        response = await self.stub.GetModel(verifier_pb2.GetModelRequest(), timeout=10)
        return wire_model.model_from_proto(response)

    @asynccontextmanager
    async def drafter(self, name: str, **hello: Any) -> AsyncIterator[RawDrafter]:
        """Yield a drafter with the verifier's tokenizer, which has sent its Hello."""
        fingerprint = (await self.model()).tokenizer_fingerprint
        fields = {"tokenizer_fingerprint": fingerprint, "max_draft_tokens": 16, **hello}
        drafter = RawDrafter(self.channel, name, **fields)
        await drafter.introduce()
        try:
            yield drafter
        finally:
            drafter.call.cancel()

    async def generate(self, request: TokenRequest) -> list[TokenChunk]:
        """Return all chunks of one request."""
        call = self.stub.GenerateTokens(wire_requests.request_to_proto(request), timeout=120)
        return [wire_requests.chunk_from_proto(response) async for response in call]

    async def answers(
        self,
        prompts: Sequence[list[int]],
        sampling: SamplingParams,
        options: SpeculationOptions,
        max_tokens: int = 48,
        at_once: int = 8,
    ) -> Answers:
        """Return the answers to these prompts; `at_once` requests run at once.

        Each answer has `max_tokens` tokens, even if an end token comes earlier.
        """
        found = Answers()
        for first in range(0, len(prompts), at_once):
            asked = [
                TokenRequest(each, max_tokens, sampling, speculation=options, ignore_eos=True)
                for each in prompts[first : first + at_once]
            ]
            for chunks in await asyncio.gather(*map(self.generate, asked)):
                found.add(chunks)
        return found

    async def connected(self, name: str, count: int = 1) -> None:
        """Wait until exactly `count` drafters with `name` as id or family are connected."""

        async def are_there() -> bool:
            drafters = (await self.model()).drafters
            found = [each for each in drafters if name in (each.drafter_id, each.family)]
            return sum(each.connected for each in found) == count

        await until(are_there)

    async def tokens(self, request: TokenRequest) -> list[int]:
        """Return all generated tokens of one request."""
        return [token for chunk in await self.generate(request) for token in chunk.token_ids]


@contextmanager
def running(stack: Stack, timeout_s: float = START_S) -> Iterator[Stack]:
    """Wait until the stack is ready, and stop it after the block."""
    try:
        stack.wait_ready(timeout_s)
        yield stack
    finally:
        stack.stop()


@contextmanager
def behind_gateway(
    stack: Stack, *flags: str, timeout_s: float = START_S
) -> Iterator[GatewayProcess]:
    """Run the stack behind a gateway during the block. The gateway stops first."""
    gateway = GatewayProcess(stack.address, flags=flags)
    try:
        stack.wait_ready(timeout_s)
        gateway.wait_ready()
        yield gateway
    finally:
        gateway.close()
        stack.stop()
