"""How fast a gateway on one core streams, and how long a token is on its way: a real verifier, a model that costs nothing."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from bisect import bisect_right
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median

import httpx
import torch

from bench.raw_client import stream
from outrider import rpc
from outrider.depth_policy import DepthPolicy
from outrider.lm.pages import PagePool
from outrider.lm.runner import Slice
from outrider.messages import ModelInfo, Stage
from outrider.stack import free_port
from outrider.tokenizer import fingerprint, load_tokenizer
from outrider.v1.verifier_pb2_grpc import add_VerifierServiceServicer_to_server
from verifier_svc.engine import Engine, Limits
from verifier_svc.engine_thread import EngineThread
from verifier_svc.metrics import Metrics
from verifier_svc.servicer import VerifierServicer

_CONNECTIONS = 64
_TOKENS_PER_S = 5_000
_TOKENS = 600
_WORD = 500


class _PacedModel:
    """The same token again and again, a step every `interval_s`; `ends` are the times at which forwards ended."""

    eos_token_ids: tuple[int, ...] = ()

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.interval_s = 0.0
        self.ends: list[float] = []
        self._logits_RV = torch.zeros(_CONNECTIONS, vocab_size)
        self._logits_RV[:, _WORD] = 1.0

    def forward(self, slices: Sequence[Slice]) -> torch.Tensor:
        due = self.ends[-1] + self.interval_s if self.ends else 0.0
        time.sleep(max(due - time.perf_counter(), 0.0))
        self.ends.append(time.perf_counter())
        return self._logits_RV[: sum(part.logit_count for part in slices)]


async def measure(models: Path) -> dict[str, float]:
    """`tokens_per_s` that a client of 64 connections was sent, `gateway_cpu_us_per_token`, and milliseconds from the end of a
    forward to the client, the median over chunks: `latency_ms_64` at that load, `latency_ms_1` with one connection at 50 tokens/s.
    """
    tokenizer = load_tokenizer(str(models / "target"))
    model = _PacedModel(tokenizer.get_vocab_size())
    async with _verifier(model, fingerprint(tokenizer)) as address, _gateway(address, models) as (port, pid):
        model.interval_s = 0.02
        alone, _ = await _load(port, model, 1, 100)
        model.interval_s = _CONNECTIONS / _TOKENS_PER_S
        before, started = _cpu_seconds(pid), time.perf_counter()
        crowded, chunks = await _load(port, model, _CONNECTIONS, _TOKENS)
        seconds, cpu = time.perf_counter() - started, _cpu_seconds(pid) - before
    tokens = _CONNECTIONS * _TOKENS
    return {
        "tokens_per_s": tokens / seconds,
        "chunks": chunks,
        "gateway_cpu_us_per_token": 1e6 * cpu / tokens,
        "latency_ms_1": 1000 * alone,
        "latency_ms_64": 1000 * crowded,
    }


@asynccontextmanager
async def _verifier(model: _PacedModel, tokenizer_fingerprint: str) -> AsyncIterator[str]:
    servicer = VerifierServicer("null")
    server = rpc.Server("outrider.v1.VerifierService")
    add_VerifierServiceServicer_to_server(servicer, server.grpc)
    [port] = await server.start("127.0.0.1:0")
    limits = Limits(DepthPolicy("fixed", 0), max_batch_tokens=4096, max_sequences=_CONNECTIONS)
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
    """Its HTTP port and process id; on one core, which this process leaves to it."""
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
                    if (await client.get(f"http://127.0.0.1:{port}/readyz")).status_code == httpx.codes.OK:
                        break
                except httpx.TransportError:
                    pass
                await asyncio.sleep(0.1)
        yield port, process.pid
    finally:
        os.sched_setaffinity(0, cores)
        process.terminate()
        await process.wait()


async def _load(port: int, model: _PacedModel, connections: int, tokens: int) -> tuple[float, int]:
    """Median seconds from the end of a forward to its chunks' arrival, over all connections, and how many chunks there were."""
    arrivals = await asyncio.gather(*(_stream(port, tokens) for _ in range(connections)))
    # The first tenth is while requests still come in.
    times = [at for each in arrivals for at in each[len(each) // 10 : -2]]
    return median(at - model.ends[bisect_right(model.ends, at) - 1] for at in times), sum(map(len, arrivals))


async def _stream(port: int, tokens: int) -> list[float]:
    """When each event of one streamed completion came."""
    limits = {"max_tokens": tokens, "temperature": 0, "stream": True, "ignore_eos": True, "speculation": {"enabled": False}}
    times: list[float] = []
    async for block in stream(port, {"model": "null", "prompt": [5, 6, 7], **limits}, {}):
        times += [time.perf_counter()] * block.count(b"data: ")
    return times


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
