"""The drafter's end of the draft stream, over real gRPC against a scripted verifier: introductions, rounds, restarts, goodbyes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from scripted_drafts import FINGERPRINT, READY, ScriptedVerifier  # lies beside this file

from drafter_svc import stream as stream_module
from drafter_svc.chain import Chain
from drafter_svc.families.base import Failures
from drafter_svc.metrics import Metrics
from drafter_svc.stream import Callbacks, DraftStream
from outrider import telemetry, wire
from outrider.errors import OutriderError, Reason
from outrider.messages import (
    Closed,
    DraftBatch,
    Hello,
    ModelInfo,
    Opened,
    Proposal,
    Rule,
    SamplingParams,
    Skip,
    Stage,
    StepBatch,
    Verdict,
    Window,
)
from outrider.v1 import common_pb2, drafts_pb2, verifier_pb2

WINDOW = Window(16, 4)
TRACEPARENT = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"


class Counting:
    """A family that guesses one more than the token before, two at a time; `slow_s` is how long a draft takes, unless cut short."""

    name = "counting"
    distributions = frozenset({Rule.ONE_HOT})
    max_depth = 8
    device = "cpu"

    def __init__(self, slow_s: float = 0.0) -> None:
        self.chains: dict[int, Chain] = {}
        self.slow_s = slow_s
        self.closed = False
        self.failures = Failures(self.close)

    def open(self, opened: Opened) -> None:
        self.chains[opened.sequence_id] = Chain(opened)

    def verdict(self, verdict: Verdict) -> None:
        if chain := self.chains.get(verdict.sequence_id):
            chain.apply(verdict)

    def close(self, sequence_id: int) -> None:
        self.chains.pop(sequence_id, None)

    async def draft(self, interrupted: Callable[[], bool]) -> DraftBatch:
        ends = time.monotonic() + self.slow_s
        drafting = any(chain.room for chain in self.chains.values())
        while drafting and time.monotonic() < ends and not interrupted():  # noqa: ASYNC110  # polled, as between two forwards
            await asyncio.sleep(0.005)
        return DraftBatch([self._run(chain) for chain in self.chains.values() if chain.room])

    def _run(self, chain: Chain) -> Proposal:
        last = [*chain.tokens, *chain.ahead][-1]
        return chain.grow([last + 1, last + 2][: chain.room])

    async def aclose(self) -> None:
        self.closed = True


def opened(sequence_id: int = 1, tokens: tuple[int, ...] = (10, 11), traceparent: str = "") -> Opened:
    return Opened(sequence_id, 0, list(tokens), SamplingParams(0.0), Rule.ONE_HOT, WINDOW, 2, traceparent=traceparent)


class Drafter:
    """A stream with its families, and whether it is registered."""

    def __init__(
        self, port: int, fingerprint: str = FINGERPRINT, slow_s: float = 0.0, make: Callable[[], Counting] | None = None
    ) -> None:
        self.families: list[Counting] = []
        self.registered = False
        self.metrics = Metrics("counting-1", "counting")

        def make_family(info: ModelInfo) -> Counting:
            self.families.append(make() if make is not None else Counting(slow_s))
            return self.families[-1]

        async def set_registered(registered: bool) -> None:
            self.registered = registered

        self.stream = DraftStream(
            lambda: f"127.0.0.1:{port}",
            make_family,
            lambda family, info: Hello("counting-1", family.name, fingerprint, family.max_depth),
            Callbacks(lambda address: set_registered(True), lambda: set_registered(False)),
            self.metrics,
        )


@asynccontextmanager
async def running(drafter: Drafter) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(drafter.stream.run())
    try:
        yield task
    finally:
        drafter.stream.stop()
        await asyncio.wait_for(asyncio.gather(task, return_exceptions=True), 5)


@pytest.fixture
async def verifier() -> AsyncIterator[ScriptedVerifier]:
    verifier = ScriptedVerifier()
    await verifier.start()
    yield verifier
    await verifier.stop()


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def test_it_introduces_itself_and_streams_ahead_of_the_verdict_up_to_the_window(verifier: ScriptedVerifier) -> None:
    drafter = Drafter(verifier.port)
    async with running(drafter):
        stream = await verifier.accepted()
        assert stream.hello == Hello("counting-1", "counting", FINGERPRINT, 8)
        stream.say(StepBatch(opened=[opened()]))
        assert await stream.hear() == DraftBatch([Proposal(1, 0, 0, 1, [12, 13])])
        assert await stream.hear() == DraftBatch([Proposal(1, 0, 2, 3, [14, 15])])
        stream.say(StepBatch(verdicts=[Verdict(1, 0, 1, 3, 1, [12])]))
        assert await stream.hear() == DraftBatch([Proposal(1, 0, 4, 5, [16])])
        assert drafter.registered


async def test_a_miss_starts_the_next_epoch_and_a_closed_sequence_falls_silent(verifier: ScriptedVerifier) -> None:
    async with running(Drafter(verifier.port)):
        stream = await verifier.accepted()
        stream.say(StepBatch(opened=[opened(1), opened(2)]))
        await stream.hear()
        await stream.hear()
        stream.say(StepBatch(verdicts=[Verdict(1, 1, 0, 3, 0, [77]), Verdict(2, 0, 2, 4, 2, [12, 13])], closed=[Closed(2)]))
        assert await stream.hear() == DraftBatch([Proposal(1, 1, 0, 1, [78, 79])])


async def test_a_verdict_that_arrives_during_a_draft_cuts_it_short(verifier: ScriptedVerifier) -> None:
    async with running(Drafter(verifier.port, slow_s=30.0)):
        stream = await verifier.accepted()
        stream.say(StepBatch(opened=[opened(1)]))
        await asyncio.sleep(0.1)
        stream.say(StepBatch(opened=[opened(2, (20,))]))
        first = await stream.hear()
        assert isinstance(first, DraftBatch)
        assert [proposal.sequence_id for proposal in first.proposals] == [1]


async def test_it_waits_while_the_verifier_loads(verifier: ScriptedVerifier) -> None:
    verifier.info = replace(READY, stage=Stage.LOADING, stage_detail="reading weights")
    async with running(Drafter(verifier.port)):
        await asyncio.sleep(0.4)
        assert verifier.streams.empty()
        verifier.info = READY
        await verifier.accepted()


async def test_it_comes_back_with_fresh_state_when_the_verifier_restarts(verifier: ScriptedVerifier) -> None:
    drafter = Drafter(verifier.port)
    async with running(drafter):
        stream = await verifier.accepted()
        stream.say(StepBatch(opened=[opened(tokens=(10, 11))]))
        await stream.hear()
        await verifier.stop()
        await until(lambda: not drafter.registered)
        await verifier.start()
        stream = await verifier.accepted()
        stream.say(StepBatch(opened=[opened(tokens=(50,))]))
        assert await stream.hear() == DraftBatch([Proposal(1, 0, 0, 1, [51, 52])])
        assert [family.closed for family in drafter.families] == [True, False]
        assert drafter.registered


@pytest.mark.parametrize(
    "error",
    [
        OutriderError(Reason.DRAFTER_ID_TAKEN, "a drafter with the id counting-1 is connected"),
        OutriderError(Reason.QUARANTINED, "in quarantine", retry_after_s=0.05),
        OutriderError(Reason.INTERNAL, "a bug"),
    ],
)
async def test_it_comes_back_after_a_failure_that_may_pass(verifier: ScriptedVerifier, error: OutriderError) -> None:
    async with running(Drafter(verifier.port)):
        (await verifier.accepted()).say(error)
        await verifier.accepted()


async def test_it_begins_anew_when_the_verifier_contradicts_itself(verifier: ScriptedVerifier) -> None:
    async with running(Drafter(verifier.port)):
        stream = await verifier.accepted()
        stream.say(StepBatch(opened=[opened()]))
        await stream.hear()
        stream.say(StepBatch(verdicts=[Verdict(1, 0, 1, 99, 1, [12])]))
        await verifier.accepted()


GARBAGE = b"\xff" * 30
SENSELESS = {
    "what cannot be parsed": GARBAGE,
    "a token that the target lacks": wire.step_to_proto(StepBatch(opened=[opened(tokens=(4096,))])),
    "no tokens": wire.step_to_proto(StepBatch(opened=[opened(tokens=())])),
    "a window without room": drafts_pb2.StepBatch(opened=[drafts_pb2.Opened(token_ids=[1])]),
    "a negative depth": drafts_pb2.StepBatch(verdicts=[drafts_pb2.Verdict(depth=-1)]),
    "a committed token that the target lacks": drafts_pb2.StepBatch(verdicts=[drafts_pb2.Verdict(new_token_ids=[2**32 - 1])]),
    "a longer prompt than text": drafts_pb2.StepBatch(
        opened=[drafts_pb2.Opened(token_ids=[1], prompt_token_count=2, window=drafts_pb2.Window(node_count=1, depth=1))]
    ),
}


def raw(message: bytes | drafts_pb2.StepBatch) -> bytes:
    if isinstance(message, bytes):
        return message
    return verifier_pb2.StreamDraftsResponse(step=message).SerializeToString()


@pytest.mark.parametrize("message", SENSELESS.values(), ids=SENSELESS.keys())
async def test_a_message_without_a_meaning_ends_the_stream_and_it_dials_again(
    verifier: ScriptedVerifier, message: bytes | drafts_pb2.StepBatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(Drafter(verifier.port)):
        (await verifier.accepted()).say(raw(message))
        stream = await verifier.accepted()
        stream.say(StepBatch(opened=[opened()]))
        assert await stream.hear() == DraftBatch([Proposal(1, 0, 0, 1, [12, 13])])
    assert "the stream to 127.0.0.1" in caplog.text


LATER = {
    "a distribution to come": drafts_pb2.StepBatch(opened=[drafts_pb2.Opened(token_ids=[10, 11], distribution=9)]),  # type: ignore[arg-type]
    "no distribution": drafts_pb2.StepBatch(opened=[drafts_pb2.Opened(token_ids=[10, 11])]),
    "a grammar to come": drafts_pb2.StepBatch(
        opened=[drafts_pb2.Opened(token_ids=[10, 11], grammar=common_pb2.Grammar.FromString(b"\x3a\x02hi"))]
    ),
    "a reason for closing to come": drafts_pb2.StepBatch(
        opened=[drafts_pb2.Opened(token_ids=[10, 11])],
        closed=[drafts_pb2.Closed(sequence_id=5, reason=99)],  # type: ignore[arg-type]
    ),
}


@pytest.mark.parametrize("step", LATER.values(), ids=LATER.keys())
async def test_what_only_a_later_verifier_says_is_drafted_for(verifier: ScriptedVerifier, step: drafts_pb2.StepBatch) -> None:
    step.opened[0].sequence_id, step.opened[0].depth = 1, 2
    step.opened[0].window.CopyFrom(drafts_pb2.Window(node_count=16, depth=4))
    async with running(Drafter(verifier.port)):
        stream = await verifier.accepted()
        # A kind of message to come is ignored.
        stream.say(b"\xfa\x3f\x02hi")
        stream.say(raw(step))
        assert await stream.hear() == DraftBatch([Proposal(1, 0, 0, 1, [12, 13])])
        assert verifier.streams.empty()


async def test_a_model_that_cannot_be_read_is_asked_for_again(verifier: ScriptedVerifier) -> None:
    of_a_later_version = verifier_pb2.GetModelResponse(stage=99, stage_detail="resharding")  # type: ignore[arg-type]
    misplaced = verifier_pb2.DrafterInfo(placement=common_pb2.Placement(cores=[-1]))
    verifier.answers = [
        GARBAGE,
        of_a_later_version.SerializeToString(),
        verifier_pb2.GetModelResponse(drafters=[misplaced]).SerializeToString(),
    ]
    async with running(Drafter(verifier.port)):
        await verifier.accepted()
    assert not verifier.answers


async def test_a_verifier_that_makes_no_sense_is_dialled_ever_more_rarely(
    verifier: ScriptedVerifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Welcome shows nothing: only a stream that lasted does."""
    delays: list[float] = []
    drafter = Drafter(verifier.port)

    async def note(seconds: float) -> None:
        delays.append(seconds)

    monkeypatch.setattr(drafter.stream, "_sleep", note)
    monkeypatch.setattr(stream_module.random, "uniform", lambda low, high: high)
    async with running(drafter):
        for _ in range(8):
            (await verifier.accepted()).say(GARBAGE)
        await until(lambda: len(delays) == 8)
        # As if it had lasted a minute.
        monkeypatch.setattr(stream_module, "_GOOD_S", 0.0)
        (await verifier.accepted()).say(GARBAGE)
        await until(lambda: len(delays) == 9)
        monkeypatch.setattr(stream_module, "_GOOD_S", 60.0)
        for retry_s in (1e-9, 0.0, 1e9):
            error = OutriderError(Reason.OVERLOADED, "later", retry_after_s=retry_s)
            (await verifier.accepted()).say(error)
        await verifier.accepted()
    assert delays[:8] == [0.1, 0.2, 0.4, 0.8, 1.6, 3.0, 3.0, 3.0]
    assert delays[8:12] == [0.1, 0.2, 0.4, 60.0]


class Breaking(Counting):
    """Fails for sequence 2, at the place it is told of."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place

    def open(self, opened: Opened) -> None:
        super().open(opened)
        self._fail_at("open", opened.sequence_id)

    def verdict(self, verdict: Verdict) -> None:
        self._fail_at("verdict", verdict.sequence_id)
        super().verdict(verdict)

    def close(self, sequence_id: int) -> None:
        super().close(sequence_id)
        self._fail_at("close", sequence_id)

    def _fail_at(self, place: str, sequence_id: int) -> None:
        if self.place == place and sequence_id == 2:
            raise ZeroDivisionError("planted")


@pytest.mark.parametrize("place", ["open", "verdict", "close"])
async def test_a_sequence_whose_part_fails_is_skipped_and_the_others_drafted_for(verifier: ScriptedVerifier, place: str) -> None:
    drafter = Drafter(verifier.port, make=lambda: Breaking(place))
    async with running(drafter):
        stream = await verifier.accepted()
        stream.say(StepBatch(opened=[opened(1), opened(2, (20, 21))]))
        first = await stream.hear()
        assert isinstance(first, DraftBatch)
        assert Proposal(1, 0, 0, 1, [12, 13]) in first.proposals
        assert first.skips == ([Skip(2, 0, 0)] if place == "open" else [])
        stream.say(StepBatch(verdicts=[Verdict(2, 1, 0, 3, 0, [9])], closed=[Closed(2)] if place == "close" else []))
        if place != "close":
            while not (batch := await stream.hear()).skips:  # type: ignore[union-attr]
                pass
            assert batch.skips == [Skip(2, 1, 0)]  # type: ignore[union-attr]
            stream.say(StepBatch(closed=[Closed(2)]))
        stream.say(StepBatch(opened=[opened(3, (30, 31))]))
        while (batch := await stream.hear()) != DraftBatch([Proposal(3, 0, 0, 1, [32, 33])]):
            assert isinstance(batch, DraftBatch)
        assert verifier.streams.empty()
        assert not drafter.families[0].failures.sequence_ids
    failed = drafter.metrics.registry.get_sample_value(
        "outrider:drafter_failed_sequences_total", {"drafter": "counting-1", "family": "counting"}
    )
    assert failed == (0.0 if place == "close" else 1.0)


async def test_drafting_that_fails_altogether_begins_anew_on_a_new_stream(
    verifier: ScriptedVerifier, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(Counting):
        async def draft(self, interrupted: Callable[[], bool]) -> DraftBatch:
            raise ZeroDivisionError("planted")

    drafter = Drafter(verifier.port, make=Failing)
    async with running(drafter):
        await verifier.accepted()
        await verifier.accepted()
    assert "ZeroDivisionError: planted" in caplog.text


async def test_a_lost_device_ends_the_process(verifier: ScriptedVerifier) -> None:
    class Lost(Counting):
        async def draft(self, interrupted: Callable[[], bool]) -> DraftBatch:
            raise ZeroDivisionError("planted")

    def make() -> Counting:
        family = Lost()
        family.failures = Failures(family.close, fatal=(ZeroDivisionError,))
        return family

    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(Drafter(verifier.port, make=make).stream.run(), 10)


async def test_it_gives_up_on_another_tokenizer_and_names_both(verifier: ScriptedVerifier) -> None:
    drafter = Drafter(verifier.port, fingerprint="a" * 64)
    with pytest.raises(OutriderError) as caught:
        await asyncio.wait_for(drafter.stream.run(), 5)
    assert caught.value.reason is Reason.TOKENIZER_MISMATCH
    assert "a" * 64 in caught.value.message
    assert FINGERPRINT in caught.value.message
    assert not drafter.registered


async def test_told_to_stop_it_says_goodbye_and_half_closes(verifier: ScriptedVerifier) -> None:
    drafter = Drafter(verifier.port, slow_s=30.0)
    async with running(drafter) as task:
        stream = await verifier.accepted()
        stream.say(StepBatch(opened=[opened()]))
        await asyncio.sleep(0.1)
        drafter.stream.stop()
        await asyncio.wait_for(task, 2)
        heard = [await stream.hear() for _ in range(3)]
        assert heard[1:] == ["the drafter is stopping", None]
        assert not drafter.registered


@pytest.mark.parametrize("state", ["loading", "silent", "deaf", "absent"])
async def test_it_stops_within_two_seconds_whatever_the_verifier_does(state: str) -> None:
    verifier = ScriptedVerifier(silent=state == "silent", deaf=state == "deaf")
    if state == "loading":
        verifier.info = replace(READY, stage=Stage.LOADING)
    await verifier.start()
    if state == "absent":
        await verifier.stop()
    drafter = Drafter(verifier.port)
    async with running(drafter) as task:
        if state in ("silent", "deaf"):
            await verifier.accepted()
        await asyncio.sleep(0.3)
        drafter.stream.stop()
        await asyncio.wait_for(task, 2)
    await verifier.stop()


async def test_a_draining_verifier_is_served_to_the_end(verifier: ScriptedVerifier) -> None:
    async with running(Drafter(verifier.port)):
        stream = await verifier.accepted()
        stream.say("about to stop")
        stream.say(StepBatch(opened=[opened()]))
        assert isinstance(await stream.hear(), DraftBatch)


async def test_each_run_is_a_span_below_the_round_it_answers(verifier: ScriptedVerifier) -> None:
    exporter = InMemorySpanExporter()
    telemetry.setup("drafter", SimpleSpanProcessor(exporter))
    try:
        async with running(Drafter(verifier.port)):
            stream = await verifier.accepted()
            stream.say(StepBatch(opened=[opened(1, traceparent=TRACEPARENT), opened(2)]))
            await stream.hear()
            await stream.hear()
    finally:
        telemetry.shutdown()
    spans = exporter.get_finished_spans()
    assert [span.name for span in spans] == ["propose", "propose"]
    assert {format(span.parent.span_id, "016x") for span in spans if span.parent} == {"0123456789abcdef"}
    attributes = spans[0].attributes or {}
    assert attributes["outrider.family"] == "counting"
    assert (attributes["outrider.epoch"], attributes["outrider.draft_tokens"]) == (0, 2)


def test_drafts_and_skips_are_one_message_where_they_fit() -> None:
    """The longest run tells how long all of it took; skips apart would seem to have taken as long on their way."""
    batch = DraftBatch([Proposal(1, 0, 0, 1, [5])] * 300, [Skip(2, 0, 0)] * 212)
    assert list(stream_module._messages(batch)) == [batch]
    parts = list(stream_module._messages(DraftBatch(batch.proposals, [*batch.skips, Skip(3, 0, 0)])))
    assert [len(part.proposals) + len(part.skips) for part in parts] == [300, 213]


async def test_what_is_too_much_for_a_message_comes_in_several(verifier: ScriptedVerifier) -> None:
    async with running(Drafter(verifier.port)):
        stream = await verifier.accepted()
        count = 600
        stream.say(StepBatch(opened=[opened(i) for i in range(count)]))
        heard: list[int] = []
        while len(heard) < 2 * count:
            batch = await stream.hear()
            assert isinstance(batch, DraftBatch)
            assert len(batch.proposals) <= 512
            heard += [proposal.sequence_id for proposal in batch.proposals]
    assert sorted(heard) == sorted([*range(count)] * 2)
