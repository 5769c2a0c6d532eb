"""The throughput and added latency of a gateway on one core.

The verifier is real; its model costs nothing.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any, cast

import httpx
import torch

from gateway.upstream.token_stream import TokenStream
from outrider.internal.v1.token_streams_pb2_grpc import (
    TokenStreamServiceStub,
    add_TokenStreamServiceServicer_to_server,
)
from outrider.lm.pages import PagePool
from outrider.lm.runner import SequenceSlice
from outrider.process import rpc
from outrider.process.ports import free_port
from outrider.protocol.draft_tokens_policy import DraftTokensPolicy
from outrider.protocol.messages import SamplingParams, SpeculationOptions, TokenRequest
from outrider.protocol.model_info import ModelInfo, Stage
from outrider.tokenizer import fingerprint, load_tokenizer
from outrider.v1.verifier_pb2_grpc import add_VerifierServiceServicer_to_server
from outrider_bench.raw_client import asks
from verifier_svc.engine.config import EngineConfig
from verifier_svc.engine.engine_thread import EngineThread
from verifier_svc.engine.loop import Engine
from verifier_svc.metrics import Metrics
from verifier_svc.streams.servicer import VerifierServicer

_CONNECTIONS = 64
# Tokens/s for latencies: of one connection, and of all.
_PACES = {1: 50, _CONNECTIONS: 5_000}
_TOKENS = 600
_TURNS = 2
_PROMPT = [5, 6, 7]
_WORD = 500


class _PacedModel:
    """Repeats one token, with a step every `interval_s`; `ends` are the times forwards ended at."""

    eos_token_ids: tuple[int, ...] = ()

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.interval_s = 0.0
        self.ends: list[float] = []
        self._logits_RV = torch.zeros(_CONNECTIONS, vocab_size)
        self._logits_RV[:, _WORD] = 1.0

    def forward(self, slices: Sequence[SequenceSlice]) -> torch.Tensor:
        """Return logits `interval_s` after the last ones, a row for each that is wanted."""
        due = 0.0
        if self.ends:
            due = self.ends[-1] + self.interval_s
        time.sleep(max(due - time.perf_counter(), 0.0))
        self.ends.append(time.perf_counter())
        return self._logits_RV[: sum(part.logit_count for part in slices)]

    def move_tokens(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Do nothing: there is no cache."""


async def measure(models: Path) -> dict[str, float]:
    """Measure a gateway's throughput and latency.

    Throughput is at full speed with 64 connections: `tokens_per_s`, `chunks` and
    `gateway_cpu_us_per_token`. Latency is with one connection at 50 tokens/s and 64 at 5,000:
    `latency_ms_*` are the median milliseconds over chunks from the end of a forward to the client.
    `added_ms_*` are `latency_ms_*` less the latency of a caller that reads from the verifier as the
    gateway does.
    """
    tokenizer = load_tokenizer(str(models / "target"))
    model = _PacedModel(tokenizer.get_vocab_size())
    found: dict[str, float] = {}
    async with (
        _verifier(model, fingerprint(tokenizer)) as address,
        _gateway(address, models) as (port, pid),
        rpc.dial(address) as channel,
    ):
        tokens = TokenStream(TokenStreamServiceStub(channel), lambda error: error, lambda: None)
        before, started = _cpu_seconds(pid), time.perf_counter()
        arrivals = await asyncio.gather(
            *(_through_gateway(port, _TOKENS) for _ in range(_CONNECTIONS))
        )
        count = _CONNECTIONS * _TOKENS
        found["tokens_per_s"] = count / (time.perf_counter() - started)
        found["chunks"] = sum(map(len, arrivals))
        found["gateway_cpu_us_per_token"] = 1e6 * (_cpu_seconds(pid) - before) / count
        for connections, pace in _PACES.items():
            model.interval_s = connections / pace
            through, direct = [], []
            for _ in range(_TURNS):
                direct.append(
                    await _latency_s(
                        model, connections, lambda: _from_verifier(tokens, _TOKENS // 4)
                    )
                )
                through.append(
                    await _latency_s(
                        model, connections, lambda: _through_gateway(port, _TOKENS // 4)
                    )
                )
            found[f"latency_ms_{connections}"] = 1000 * median(through)
            found[f"added_ms_{connections}"] = 1000 * (median(through) - median(direct))
        await tokens.close()
    return found


@asynccontextmanager
async def _verifier(model: _PacedModel, tokenizer_fingerprint: str) -> AsyncIterator[str]:
    servicer = VerifierServicer("null")
    server = rpc.Server("outrider.v1.VerifierService")
    add_VerifierServiceServicer_to_server(servicer, server.grpc)
    add_TokenStreamServiceServicer_to_server(servicer, server.grpc)
    [port] = await server.start("127.0.0.1:0")
    limits = EngineConfig(
        DraftTokensPolicy("fixed", 0), max_batch_tokens=4096, max_sequences=_CONNECTIONS
    )
    pool = PagePool(_CONNECTIONS * 64, 16)
    thread = EngineThread(lambda deliver: Engine(model, pool, deliver, Metrics("null"), limits))
    await thread.built
    info = ModelInfo("null", Stage.READY, "serving", tokenizer_fingerprint, model.vocab_size, 1024)
    servicer.serve(thread, info)
    await server.set_serving(True)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await thread.stop()
        await server.stop(0.1)


@asynccontextmanager
async def _gateway(verifier: str, models: Path) -> AsyncIterator[tuple[int, int]]:
    """Start a gateway on one core, which this process leaves to it; yields HTTP port and pid."""
    port, cores = free_port("127.0.0.1"), sorted(os.sched_getaffinity(0))
    flags = [
        "--verifier",
        verifier,
        "--tokenizer",
        str(models / "target"),
        "--http-port",
        str(port),
        "--grpc-listen",
        "127.0.0.1:0",
    ]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway", *flags, "--log-level", "warning", stdout=subprocess.DEVNULL
    )
    os.sched_setaffinity(process.pid, cores[:1])
    os.sched_setaffinity(0, cores[1:] or cores)
    try:
        async with httpx.AsyncClient() as client:
            for _ in range(200):
                try:
                    if (
                        await client.get(f"http://127.0.0.1:{port}/readyz")
                    ).status_code == httpx.codes.OK:
                        break
                except httpx.TransportError:
                    pass
                await asyncio.sleep(0.1)
        yield port, process.pid
    finally:
        os.sched_setaffinity(0, cores)
        process.terminate()
        await process.wait()


async def _latency_s(
    model: _PacedModel, connections: int, stream: Callable[[], Coroutine[Any, Any, list[float]]]
) -> float:
    """Median seconds from the end of a forward to its chunks' arrival, over all connections."""
    arrivals = await asyncio.gather(*(stream() for _ in range(connections)))
    # Requests still arrive during the first tenth.
    times = [at for each in arrivals for at in each[len(each) // 10 : -2]]
    return median(at - model.ends[bisect_right(model.ends, at) - 1] for at in times)


async def _from_verifier(stream: TokenStream, tokens: int) -> list[float]:
    """The times at which the chunks of one sequence came from the verifier itself."""
    speculation = SpeculationOptions(enabled=False)
    request = TokenRequest(
        _PROMPT, tokens, SamplingParams(0.0), ignore_eos=True, speculation=speculation
    )
    return [time.perf_counter() async for _ in stream.generate(request)]


async def _through_gateway(port: int, tokens: int) -> list[float]:
    """The times at which the events of one streamed completion came."""
    limits = {
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
        "speculation": {"enabled": False},
    }
    request = asks({"model": "null", "prompt": _PROMPT, **limits}, {})
    _, arrivals = await asyncio.get_running_loop().create_connection(
        lambda: _Arrivals(request), "127.0.0.1", port
    )
    return await arrivals.times


class _Arrivals(asyncio.Protocol):
    """Records when events arrive.

    It reads the clock in the protocol's callback, because 64 stream readers would take more of the
    processor than the gateway.
    """

    def __init__(self, request: bytes) -> None:
        self.times: asyncio.Future[list[float]] = asyncio.get_running_loop().create_future()
        self._request = request
        self._found: list[float] = []
        self._end = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        cast(asyncio.WriteTransport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        """Note the time for each event that has arrived."""
        self._found += [time.perf_counter()] * data.count(b"data: ")
        self._end = self._end[-100:] + data

    def connection_lost(self, _error: Exception | None) -> None:
        """Hand out the times, or a RuntimeError if no `[DONE]` or an error came."""
        if b"[DONE]" in self._end and b'data: {"error"' not in self._end:
            self.times.set_result(self._found)
        else:
            self.times.set_exception(
                RuntimeError(f"the gateway hung up: {self._end.decode(errors='replace')}")
            )


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
