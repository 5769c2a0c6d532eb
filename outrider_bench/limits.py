"""`outrider bench --only limits`: the most that host, n-gram pools and gateway can do.

The model costs nothing.
"""

from __future__ import annotations

import asyncio
import gc
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from redis import Redis
from rich.console import Console
from rich.table import Table

from drafter_svc.pools.keys import PoolKeys
from drafter_svc.pools.memory import MemoryPool, NgramOptions
from drafter_svc.pools.redis import Query, RedisOptions, RedisPool
from drafter_svc.pools.redis_server import RedisServer
from outrider.errors import OutriderError
from outrider.lm.pages import PagePool
from outrider.lm.runner import SequenceSlice
from outrider.process.ports import free_port
from outrider.protocol.draft_messages import DraftBatch, Hello, Proposal, StepBatch
from outrider.protocol.draft_tokens_policy import DraftTokensPolicy
from outrider.protocol.messages import SamplingParams, TokenRequest
from outrider_bench import gateway_load
from outrider_bench.console import table_of
from verifier_svc.engine.config import EngineConfig
from verifier_svc.engine.loop import Engine
from verifier_svc.engine.outbox import Delivery
from verifier_svc.metrics import Metrics

_VOCAB = 256
_BATCHES = (1, 16, 64, 256)
_STEPS = 60
_POOL_ENTRIES = 10_000_000
_LOOKUPS = 5_000
_MEMORY_TOKENS = 1_000_000
# Wheels have a compiled step.
_COMPILED = not str(sys.modules[Engine.__module__].__file__).endswith(".py")


async def measure(models: Path, out: Path, console: Console) -> dict[str, Any]:
    """Measure and print all limits; returns the record.

    Values are in seconds unless the key says otherwise.
    """
    # A verifier does this once it is loaded.
    gc.collect()
    gc.freeze()
    record = {
        **_measure_host(console),
        **await _measure_lookups(console),
        **await _measure_redis_memory(console),
    }
    record["gateway"] = gateway = await gateway_load.measure(models)
    table = Table(
        title="a gateway on one core: 64 connections at full speed; "
        "latency at 50 tokens/s (1) and 5,000 (64)"
    )
    for name in gateway:
        table.add_column(name, justify="right")
    table.add_row(*(f"{value:.2f}" for value in gateway.values()))
    console.print(table)
    return record


def _measure_host(console: Console) -> dict[str, Any]:
    host = {batch: _host_seconds(batch, drafts=False) for batch in _BATCHES}
    drafted = {batch: _host_seconds(batch, drafts=True) for batch in _BATCHES}
    how = "not compiled"
    if _COMPILED:
        how = "compiled"
    table = Table(
        title="the engine's host time a step, with a model that costs nothing, "
        f"µs (median of 60 steps); {how}"
    )
    for name in ("sequences", "plain", "each", "3 drafted tokens each", "each"):
        table.add_column(name, justify="right")
    for batch in _BATCHES:
        cells = [f"{1e6 * seconds[batch]:.0f}" for seconds in (host, drafted)]
        each = [_each(seconds, batch) for seconds in (host, drafted)]
        table.add_row(str(batch), cells[0], each[0], cells[1], each[1])
    console.print(table)
    return {"host": {"plain": host, "drafted": drafted, "compiled": _COMPILED}}


async def _measure_lookups(console: Console) -> dict[str, Any]:
    record: dict[str, Any] = {}
    columns = ("pool", "p50, µs", "p99, µs", "remarks")
    table = table_of("n-gram lookups", columns, text=["remarks"])
    for name, times, remark in (_memory_lookups(), await _redis_lookups()):
        ordered = sorted(times)
        p50, p99 = (1e6 * ordered[int(len(ordered) * share)] for share in (0.5, 0.99))
        table.add_row(name, f"{p50:.1f}", f"{p99:.1f}", remark)
        record[name] = {"p50_us": p50, "p99_us": p99}
    console.print(table)
    return record


async def _measure_redis_memory(console: Console) -> dict[str, Any]:
    record: dict[str, Any] = {}
    table = Table(title=f"Redis memory for {_MEMORY_TOKENS:,} tokens in which no pair repeats")
    for name in ("n-gram size", "n-grams", "MB", "bytes an n-gram", "written, n-grams/s"):
        table.add_column(name, justify="right")
    for size in (3, 4):
        count, held, seconds = await _redis_memory(size)
        megabytes = f"{held / 1e6:.0f}"
        rate = f"{count / seconds:,.0f}"
        table.add_row(str(size), f"{count:,}", megabytes, f"{held / count:.0f}", rate)
        record[f"redis_memory_{size}"] = {"ngrams": count, "bytes": held, "seconds": seconds}
    console.print(table)
    return record


def _each(seconds: dict[int, float], batch: int) -> str:
    """The time that a further sequence adds, in µs."""
    if batch == 1:
        return "–"
    return f"{1e6 * (seconds[batch] - seconds[1]) / (batch - 1):.1f}"


class _NullModel:
    """A model with ready logits: token 0 follows everything."""

    vocab_size = _VOCAB
    eos_token_ids: tuple[int, ...] = ()

    def __init__(self) -> None:
        self._logits_RV = torch.zeros(256 * 4, _VOCAB)
        self._logits_RV[:, 0] = 1.0

    def forward(self, slices: Sequence[SequenceSlice]) -> torch.Tensor:
        """Return the same logits at once, one row for each that is wanted."""
        return self._logits_RV[: sum(part.logit_count for part in slices)]

    def move_tokens(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Do nothing: there is no cache."""


def _host_seconds(batch: int, *, drafts: bool) -> float:
    """Return the median seconds of a step of `batch` decoding sequences.

    The step takes drafts and makes the messages to clients and drafters, but sends none.
    """

    def deliver(deliveries: list[Delivery]) -> None:
        for sink, argument in deliveries:
            sink(argument)

    pool = PagePool(batch * 40, 16)
    limits = EngineConfig(
        DraftTokensPolicy("fixed", 3), max_batch_tokens=batch * 16, max_sequences=batch
    )
    engine = Engine(_NullModel(), pool, deliver, Metrics("null"), limits)
    told: list[StepBatch | OutriderError] = []
    drafter = None
    if drafts:
        drafter = engine.drafting.join(Hello("d", "d", "f", 16), told.append)
    request = TokenRequest([1] * 8, 500, SamplingParams(0.0))
    sequences = [engine.submit(request, lambda chunk: None) for _ in range(batch)]
    times = []
    for _ in range(_STEPS):
        # The bonus token is part of the run, so the next draft hangs below it.
        runs = [
            Proposal(sequence.id, len(sequence.tokens), [0] * 4)
            for sequence in sequences
            if drafter is not None and sequence.assignments["d"].trie.node_count == 0
        ]
        started = time.perf_counter()
        if drafter is not None:
            engine.drafting.on_drafts(drafter, DraftBatch(runs))
        while (rest_s := engine.advance()) != 0.0:
            time.sleep(rest_s or 0.0)
        times.append(time.perf_counter() - started)
    return median(times[5:])


def _memory_lookups() -> tuple[str, list[float], str]:
    """Lookups of suffixes that are mostly known, in a pool of ten million n-grams."""
    generator = random.Random(0)
    options = NgramOptions(max_matching_ngram_size=3)
    pool = MemoryPool(options, _POOL_ENTRIES)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    texts = []
    while len(pool) < _POOL_ENTRIES:
        text = [generator.randrange(50_000) for _ in range(20_000)]
        pool.index(text, 0)
        texts.append(text)
    held = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024**2
    times = []
    for _ in range(_LOOKUPS):
        text = generator.choice(texts[-100:])
        at = generator.randrange(3, len(text) - 8)
        context = text[at - 3 : at]
        started = time.perf_counter()
        pool.continuation(context, 8)
        times.append(time.perf_counter() - started)
    return f"memory, {len(pool):,} n-grams", times, f"{held:.1f} GiB"


@contextmanager
def _redis() -> Iterator[int]:
    """A redis-server of our own, by its port."""
    binary = shutil.which("redis-server")
    if binary is None:
        raise RuntimeError("redis-server is missing; `make test` installs it")
    port = free_port("127.0.0.1")
    with tempfile.TemporaryDirectory() as directory:
        arguments = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", directory]
        server = subprocess.Popen([binary, *arguments], stdout=subprocess.DEVNULL)
        try:
            time.sleep(0.5)
            yield port
        finally:
            server.terminate()
            server.wait()


async def _redis_lookups() -> tuple[str, list[float], str]:
    """Lookups of a batch of 32 sequences in one round trip to a Redis on the loopback interface."""
    with _redis() as port:
        # With a budget that no lookup exceeds, so that late ones are measured as well.
        server = RedisServer.parse(f"redis://127.0.0.1:{port}/0")
        keys = PoolKeys(b"secret")
        pool = RedisPool(server, keys, "fingerprint", 50_000, RedisOptions(budget_s=1.0))
        tenant = pool.tenant("tenant")
        generator = random.Random(0)
        ngrams = [[generator.randrange(50_000) for _ in range(3)] for _ in range(10_000)]
        for ngram in ngrams:
            pool.offer(tenant, ngram, [1, 2, 3, 4, 5, 6, 7, 8])
        for _ in range(200):
            if pool.counters.written == len(ngrams):
                break
            await asyncio.sleep(0.05)
        times = []
        for _ in range(1_000):
            queries = [
                Query(tenant, [ngram[-size:] for size in (3, 2, 1)])
                for ngram in generator.sample(ngrams, 32)
            ]
            started = time.perf_counter()
            found = await pool.lookup(queries)
            times.append(time.perf_counter() - started)
            if not all(found):
                raise RuntimeError("Redis did not find what was written")
        await pool.aclose()
    return "Redis on loopback, batch of 32", times, "one round trip, 96 n-grams"


async def _redis_memory(size: int) -> tuple[int, int, float]:
    """Write the n-grams of up to `size` tokens of a random text to Redis.

    Returns their number, the bytes that Redis takes for them, and the seconds that writing took.
    """
    generator = random.Random(0)
    tokens = [generator.randrange(50_000) for _ in range(_MEMORY_TOKENS)]
    with _redis() as port, Redis(port=port) as client:
        server = RedisServer.parse(f"redis://127.0.0.1:{port}/0")
        keys = PoolKeys(b"secret")
        pool = RedisPool(
            server, keys, "fingerprint", 50_000, RedisOptions(max_entries=10 * _MEMORY_TOKENS)
        )
        before, started = client.info("memory")["used_memory"], time.monotonic()
        tenant, counters, offered = pool.tenant("tenant"), pool.counters, 0
        for end in range(size, _MEMORY_TOKENS - 8):
            for length in range(1, size + 1):
                pool.offer(tenant, tokens[end - length : end], tokens[end : end + 8])
                offered += 1
            while offered - counters.written - counters.dropped > 8_000:  # noqa: ASYNC110  # of writes there is no event
                await asyncio.sleep(0.001)
        while counters.written + counters.dropped < offered:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        seconds = time.monotonic() - started
        held = client.info("memory")["used_memory"] - before
        count = sum(client.zcard(key) for key in client.scan_iter(_type="ZSET"))
        await pool.aclose()
    if counters.dropped:
        raise RuntimeError("Redis did not take what was offered")
    return count, held, seconds
