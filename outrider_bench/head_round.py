"""A head's round at the sizes of a large target, part by part.

The head has random weights. A round begins with the states that a target's forward left on its
device, and ends with guesses on the host. Both ways run the production code but for the target, and
both ends of the stream are in this process.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import grpc
import torch

from drafter_svc.families.head_worker import HeadDraft, HeadWorker
from outrider.lm.devices import find_device
from outrider.lm.runner import ModelRunner
from outrider.protocol.draft_messages import (
    FeatureRows,
    Features,
    StepBatch,
    Verdict,
)
from outrider.protocol.wire import drafts as wire
from outrider.v1 import drafts_pb2
from outrider_bench.commands.head_round import HeadRoundSettings
from outrider_bench.console import progress
from outrider_bench.head_rig import HeadRig
from outrider_bench.processor import processor_name
from outrider_bench.random_head import random_eagle3

_SERVICE, _METHOD = "outrider.bench.HeadRound", "Send"
# A verifier splits messages of more than 4 MiB.
_UNBOUNDED = [(f"grpc.max_{way}_message_length", -1) for way in ("send", "receive")]
# Bytes of a draft on the wire, about.
_ANSWER_BYTES = 200
# Copies of the features in each part. Those inside gRPC and the kernel are not counted.
_COPIES_IN_PROCESS = {"states": 2, "head": 1}
_COPIES = {"states": 3, "message": 3, "parsing": 2, "head": 2}
# From the target's device to the host, and from the host to the head's device.
_COPIES_OF_A_GPU = {"states": 1, "head": 1}
_Result = TypeVar("_Result")


def run(settings: HeadRoundSettings) -> int:
    """Measure and print; returns the exit status. Raises ValueError for a missing device."""
    device = find_device(settings.device)
    print(f"{settings.hidden} wide on {_name(device)}, {settings.vocab} tokens", flush=True)
    for line in table(measure(settings, device)):
        print(line)
    return 0


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a round: its fastest time, and the copies of the features that it makes."""

    name: str
    seconds: float
    copies: int


@dataclass(slots=True)
class Round:
    """A round of `batch` sequences: one way, chains or trees."""

    batch: int
    way: str
    shape: str
    feature_bytes: int
    """Of one token."""
    sent_bytes: int
    """Of the whole message to the drafter; 0 in process."""
    parts: list[Part] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Of all parts."""
        return sum([part.seconds for part in self.parts])

    @property
    def copies(self) -> int:
        """Copies of the features, without those inside gRPC and the kernel."""
        return sum([part.copies for part in self.parts])


def measure(settings: HeadRoundSettings, device: torch.device) -> list[Round]:
    """Measure all batches, in process and by the stream, with chains and trees."""
    rounds = []
    with ThreadPoolExecutor(1, thread_name_prefix="head") as thread:
        rig = HeadRig(thread.submit(_load, thread, settings, device).result())
        asked = [*itertools.product(settings.batch, (False, True), (False, True))]
        with progress() as bar:
            for batch, trees, by_stream in bar.track(asked, description="rounds"):
                bench = _Bench(rig, settings, device, batch, trees=trees)
                rounds.append(bench.run(by_stream=by_stream))
    return rounds


def table(rounds: list[Round]) -> list[str]:
    """Lines of a Markdown table."""
    lines = [
        "| batch | draft | way | bytes a token | message, bytes | copies | round, ms | of it |",
        "| ---: | --- | --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for each in rounds:
        parts = ", ".join(f"{part.name} {1000 * part.seconds:.2f}" for part in each.parts)
        counts = f"{each.feature_bytes} | {each.sent_bytes} | {each.copies}"
        way = f"{each.batch} | {each.shape} | {each.way}"
        lines.append(f"| {way} | {counts} | {1000 * each.seconds:.2f} | {parts} |")
    return lines


def _load(
    thread: ThreadPoolExecutor, settings: HeadRoundSettings, device: torch.device
) -> HeadWorker:
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    tokens = settings.context + settings.committed * (settings.repeats + 3) + 64
    model = random_eagle3(
        hidden_size=settings.hidden,
        intermediate_size=settings.intermediate,
        head_count=settings.heads,
        kv_head_count=settings.kv_heads,
        vocab_size=settings.vocab,
        draft_vocab_size=settings.draft_vocab,
        page_count=max(settings.batch) * (tokens // 16 + 1),
        dtype=torch.bfloat16,
        device=device,
    )
    return HeadWorker(model, thread)


class _States(ModelRunner):
    """The states of a target's last forward, without the target."""

    def __init__(self, kept: dict[int, torch.Tensor], device: torch.device) -> None:
        self._kept = kept
        self.device = device
        self.projections = {}


class _Bench:
    """Rounds of one batch."""

    def __init__(
        self,
        rig: HeadRig,
        settings: HeadRoundSettings,
        device: torch.device,
        batch: int,
        *,
        trees: bool,
    ) -> None:
        self._rig, self._settings, self._device, self._trees = rig, settings, device, trees
        self._request = rig.worker.feature_request
        count = batch * settings.committed
        states = {i: self._random(count, settings.hidden) for i in self._request.states}
        self._target = _States(states, device)
        self._drafts = [self._begun() for _ in range(batch)]
        self._best: dict[str, float] = {}

    def run(self, *, by_stream: bool) -> Round:
        """Measure rounds of one way, then free the sequences."""
        if by_stream:
            sent = asyncio.run(self._stream())
        else:
            sent = 0
            for _ in range(self._settings.repeats + 1):
                rows = self._timed("states", lambda: self._rows(self._target.pick_states))
                self._guess(rows)
        for draft in self._drafts:
            self._rig.worker.close(draft)
        shape = "tree" if self._trees else "chain"
        width = len(self._request.states) * self._settings.hidden
        found = Round(
            len(self._drafts),
            "stream" if by_stream else "in process",
            shape,
            width * self._request.dtype.size,
            sent,
        )
        copies = Counter(_COPIES if by_stream else _COPIES_IN_PROCESS)
        if by_stream and self._device.type == "cuda":
            copies.update(_COPIES_OF_A_GPU)
        found.parts = [Part(name, best, copies[name]) for name, best in self._best.items()]
        return found

    async def _stream(self) -> int:
        """Rounds through messages and gRPC; returns the bytes of a message."""
        sent = b""
        async with _stream(bytes(_ANSWER_BYTES * len(self._drafts))) as send:
            for _ in range(self._settings.repeats + 1):
                data = self._timed("states", lambda: self._rows(self._target.copy_states))
                sent = self._timed("message", partial(self._message, data))
                started = time.perf_counter()
                got = await send(sent)
                self._keep("gRPC", time.perf_counter() - started)
                self._guess(self._timed("parsing", partial(self._parsed, got)))
        return len(sent)

    def _guess(self, rows: torch.Tensor | Sequence[FeatureRows]) -> None:
        """Commit, read the features and guess: one call of the head's thread."""
        committed = self._settings.committed
        parts = rows
        if isinstance(rows, torch.Tensor):
            parts = [*torch.split(rows, committed)]

        def work() -> None:
            for draft, own in zip(self._drafts, parts, strict=True):
                self._rig.commit(draft, self._tokens(committed), own)
            self._rig.draft(self._drafts, self._settings.guesses, trees=self._trees)

        self._timed("head", work)

    def _rows(self, take: Callable[..., _Result]) -> _Result:
        count = len(self._drafts) * self._settings.committed
        return take(self._request.states, range(count), "bfloat16")

    def _message(self, data: bytes) -> bytes:
        size = len(data) // len(self._drafts)
        features, verdicts = [], []
        for i, draft in enumerate(self._drafts):
            length = len(draft.sequence.tokens)
            new = self._tokens(self._settings.committed)
            own = data[i * size : (i + 1) * size]
            features.append(Features(draft.sequence.id, length - 1, own))
            verdicts.append(Verdict(draft.sequence.id, length + len(new), new, 0, 4))
        step = StepBatch(features=features, verdicts=verdicts)
        return wire.step_to_proto(step).SerializeToString()

    def _parsed(self, message: bytes) -> list[FeatureRows]:
        proto = drafts_pb2.StepBatch.FromString(message)
        step = wire.step_from_proto(proto, self._settings.vocab)
        return [features.rows for features in step.features]

    def _timed(self, name: str, work: Callable[[], _Result]) -> _Result:
        started = time.perf_counter()
        result = work()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._keep(name, time.perf_counter() - started)
        return result

    def _keep(self, name: str, seconds: float) -> None:
        self._best[name] = min(self._best.get(name, math.inf), seconds)

    def _begun(self) -> HeadDraft:
        draft = self._rig.begin(self._tokens(self._settings.context))
        count = self._settings.context - 1
        width = len(self._request.states) * self._settings.hidden
        draft.keep(0, self._random(count, width))
        return draft

    def _tokens(self, count: int) -> list[int]:
        return torch.randint(self._settings.vocab, (count,)).tolist()

    def _random(self, rows: int, width: int) -> torch.Tensor:
        return torch.randn(rows, width, device=self._device).to(torch.bfloat16)


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()


@asynccontextmanager
async def _stream(answer: bytes) -> AsyncIterator[Callable[[bytes], Awaitable[bytes]]]:
    """A gRPC stream over the loopback interface: each message is answered, and what came returned.

    Both ends are on this event loop.
    """
    came: list[bytes] = []

    async def serve(messages: AsyncIterator[bytes], _: object) -> AsyncIterator[bytes]:
        async for message in messages:
            came.append(message)
            yield answer

    handler = grpc.stream_stream_rpc_method_handler(serve)
    server = grpc.aio.server(options=_UNBOUNDED)
    handlers = grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: handler})
    server.add_generic_rpc_handlers((handlers,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=_UNBOUNDED) as channel:
        # grpc-stubs want serializers, which bytes need not.
        method: Any = channel.stream_stream
        call = method(f"/{_SERVICE}/{_METHOD}")()

        async def send(message: bytes) -> bytes:
            await call.write(message)
            await call.read()
            return came.pop()

        yield send
        call.cancel()
    await server.stop(None)
