"""Starts Outrider's processes for tests, and talks to a verifier as a client would."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import grpc

from outrider.messages import TokenChunk, TokenRequest
from outrider.model_info import ModelInfo, Stage
from outrider.process import rpc
from outrider.v1 import verifier_pb2, verifier_pb2_grpc
from outrider.wire import model as wire_model
from outrider.wire import requests as wire_requests

ROOT = Path(__file__).parents[2]
TARGET, DRAFT = str(ROOT / "models/target"), str(ROOT / "models/draft")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Process:
    """One process of the stack with its output in a file."""

    def __init__(self, module: str, *arguments: str, command: Sequence[str] = ()) -> None:
        """Of a module of this repository, or of `command` where it is no Python."""
        self.arguments = [*(command or (sys.executable, "-m", module)), *arguments]
        self.log = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the process object
        self.start()

    def start(self) -> None:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        self.popen = subprocess.Popen(
            self.arguments,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
        )

    def output(self) -> str:
        self.log.seek(0)
        return self.log.read().decode(errors="replace")

    def kill(self) -> None:
        """As a crash would."""
        self.popen.kill()
        self.popen.wait()

    def stop(self, timeout_s: float = 15.0) -> int:
        """SIGTERM; the exit status."""
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGTERM)
        try:
            return self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"{self.arguments} did not stop:\n{self.output()}") from None


class Stack:
    """A verifier with the bundled target in float32, and drafters by name."""

    def __init__(self, *verifier_flags: str) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        # One thread: OpenMP's threads meet at barriers, which on a machine that is busy with tests costs more than they bring.
        flags = ["--dtype", "float32", "--threads", "1", "--listen", self.address, *verifier_flags]
        self.verifier = Process("verifier_svc", "--target", TARGET, *flags)
        self.drafters: dict[str, Process] = {}

    def add_drafter(self, name: str, family: str, *flags: str) -> None:
        model = (
            ["--model", DRAFT, "--dtype", "float32", "--threads", "1"] if family == "model" else []
        )
        arguments = ["--family", family, "--verifier", self.address, "--id", name, *model, *flags]
        self.drafters[name] = Process("drafter_svc", *arguments)

    def wait_ready(self, timeout_s: float = 90.0) -> ModelInfo:
        """Until the target is loaded and every drafter is connected."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for process in (self.verifier, *self.drafters.values()):
                assert process.popen.poll() is None, process.output()
            info = self._model()
            if info is not None and info.stage is Stage.READY:
                connected = {drafter.drafter_id for drafter in info.drafters if drafter.connected}
                if connected >= set(self.drafters):
                    return info
            time.sleep(0.1)
        raise AssertionError(
            f"not ready after {timeout_s} s:\n"
            + "\n".join(p.output() for p in (self.verifier, *self.drafters.values()))
        )

    def _model(self) -> ModelInfo | None:
        with grpc.insecure_channel(self.address) as channel:
            try:
                response = verifier_pb2_grpc.VerifierServiceStub(channel).GetModel(
                    verifier_pb2.GetModelRequest(), timeout=5
                )
            except grpc.RpcError:
                return None
        return wire_model.model_from_proto(response)

    def stop(self) -> None:
        for process in (*self.drafters.values(), self.verifier):
            process.stop()
            process.log.close()


class Client:
    """A gRPC client of one verifier; use as an async context manager."""

    def __init__(self, address: str) -> None:
        self.channel = rpc.dial(address)
        self.stub = verifier_pb2_grpc.VerifierServiceStub(self.channel)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close()

    async def model(self) -> ModelInfo:
        return wire_model.model_from_proto(
            await self.stub.GetModel(verifier_pb2.GetModelRequest(), timeout=10)
        )

    async def generate(self, request: TokenRequest) -> list[TokenChunk]:
        call = self.stub.GenerateTokens(wire_requests.request_to_proto(request), timeout=120)
        return [wire_requests.chunk_from_proto(response) async for response in call]

    async def tokens(self, request: TokenRequest) -> list[int]:
        return [token for chunk in await self.generate(request) for token in chunk.token_ids]


@contextmanager
def running(stack: Stack) -> Iterator[Stack]:
    try:
        stack.wait_ready()
        yield stack
    finally:
        stack.stop()
