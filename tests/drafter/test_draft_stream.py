"""The drafter's end of the draft stream over real gRPC: hello, rounds, restarts and goodbye."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from outrider.drafter import grpc_transport
from outrider.drafter import stream as stream_module
from outrider.errors import OutriderError, Reason
from outrider.protocol.draft_messages import (
    DraftBatch,
    Hello,
    Proposal,
    Skip,
    StepBatch,
    Verdict,
)
from outrider.protocol.limits import MAX_BATCH_TOKENS
from outrider.protocol.model_info import Stage
from outrider.protocol.wire.drafts import drafts_from_proto, drafts_to_proto
from tests.drafter.counting_drafter import TRACEPARENT, Counting, Drafter, opened, running
from tests.drafter.scripted_drafts import FINGERPRINT, READY, ScriptedVerifier
from tests.waiting import until


async def test_it_says_hello_and_drafts_ahead_up_to_the_window(
    verifier: ScriptedVerifier,
) -> None:
    drafter = Drafter(verifier.port)
    async with running(drafter):
        stream = await verifier.accepted()
        assert stream.said == Hello("counting-1", "counting", FINGERPRINT, 8)
        stream.send(StepBatch(opened=[opened()]))
        assert await stream.receive() == DraftBatch([Proposal(1, 2, [12, 13])])
        assert await stream.receive() == DraftBatch([Proposal(1, 2, [12, 13, 14, 15])])
        stream.send(StepBatch(verdicts=[Verdict(1, 3, [12], 1, 2)]))
        assert await stream.receive() == DraftBatch([Proposal(1, 3, [13, 14, 15, 16])])
        assert drafter.registered


async def test_a_verdict_that_arrives_during_a_draft_cuts_it_short(
    verifier: ScriptedVerifier,
) -> None:
    drafter = Drafter(verifier.port, slow_s=60.0)
    async with running(drafter):
        stream = await verifier.accepted()
        stream.send(StepBatch(opened=[opened(1)]))
        await until(lambda: bool(drafter.families))
        await drafter.families[0].is_drafting.wait()
        stream.send(StepBatch(opened=[opened(2, (20,))]))
        first = await stream.receive()
        assert isinstance(first, DraftBatch)
        assert [proposal.sequence_id for proposal in first.proposals] == [1]


async def test_it_waits_while_the_verifier_loads(verifier: ScriptedVerifier) -> None:
    verifier.serve(replace(READY, stage=Stage.LOADING, stage_detail="reading weights"))
    async with running(Drafter(verifier.port)):
        await asyncio.sleep(0.4)
        assert verifier.streams.empty()
        verifier.serve(READY)
        await verifier.accepted()


async def test_it_reconnects_with_fresh_state_after_a_restart(
    verifier: ScriptedVerifier,
) -> None:
    drafter = Drafter(verifier.port)
    async with running(drafter):
        stream = await verifier.accepted()
        stream.send(StepBatch(opened=[opened(tokens=(10, 11))]))
        await stream.receive()
        await verifier.stop()
        await until(lambda: not drafter.registered)
        await verifier.start()
        stream = await verifier.accepted()
        stream.send(StepBatch(opened=[opened(tokens=(50,))]))
        assert await stream.receive() == DraftBatch([Proposal(1, 1, [51, 52])])
        assert [family.is_closed for family in drafter.families] == [True, False]
        assert drafter.registered


@pytest.mark.parametrize(
    "error",
    [
        OutriderError(Reason.DRAFTER_ID_TAKEN, "a drafter with the id counting-1 is connected"),
        OutriderError(Reason.QUARANTINED, "in quarantine", retry_after_s=0.05),
        OutriderError(Reason.INTERNAL, "a bug"),
    ],
)
async def test_it_reconnects_after_a_passing_failure(
    verifier: ScriptedVerifier, error: OutriderError
) -> None:
    async with running(Drafter(verifier.port)):
        (await verifier.accepted()).send(error)
        await verifier.accepted()


@pytest.mark.parametrize("how", ["hangs", "fails"])
async def test_it_reconnects_though_the_strategy_cannot_be_closed(
    verifier: ScriptedVerifier, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_module, "_CLOSE_S", 0.1)

    class Stubborn(Counting):
        async def aclose(self) -> None:
            if how == "fails":
                raise RuntimeError("planted")
            await asyncio.Event().wait()

    async with running(Drafter(verifier.port, make=Stubborn)):
        (await verifier.accepted()).send(OutriderError(Reason.INTERNAL, "a bug"))
        await verifier.accepted()


async def test_it_gives_up_on_another_tokenizer_and_names_both(verifier: ScriptedVerifier) -> None:
    """The drafter gives up even if its strategy's `aclose` fails."""

    class Failing(Counting):
        async def aclose(self) -> None:
            raise RuntimeError("planted")

    drafter = Drafter(verifier.port, fingerprint="a" * 64, make=Failing)
    with pytest.raises(OutriderError) as caught:
        await drafter.stream.run()
    assert caught.value.reason is Reason.TOKENIZER_MISMATCH
    assert "a" * 64 in caught.value.message
    assert FINGERPRINT in caught.value.message
    assert len(drafter.families) == 1
    assert not drafter.registered


async def test_on_stop_it_sends_draining_and_half_closes(verifier: ScriptedVerifier) -> None:
    drafter = Drafter(verifier.port, slow_s=60.0)
    async with running(drafter) as task:
        stream = await verifier.accepted()
        stream.send(StepBatch(opened=[opened()]))
        await until(lambda: bool(drafter.families))
        await drafter.families[0].is_drafting.wait()
        drafter.stream.stop()
        await asyncio.wait_for(task, 10)
        messages = [await stream.receive() for _ in range(3)]
        assert messages[1:] == ["the drafter is stopping", None]
        assert not drafter.registered


@pytest.mark.parametrize("state", ["loading", "silent", "stops_reading", "absent"])
async def test_it_stops_within_two_seconds_whatever_the_verifier_does(state: str) -> None:
    verifier = ScriptedVerifier(silent=state == "silent", stops_reading=state == "stops_reading")
    if state == "loading":
        verifier.serve(replace(READY, stage=Stage.LOADING))
    await verifier.start()
    if state == "absent":
        await verifier.stop()
    drafter = Drafter(verifier.port)
    async with running(drafter) as task:
        if state in ("silent", "stops_reading"):
            await verifier.accepted()
        await asyncio.sleep(0.3)
        drafter.stream.stop()
        await asyncio.wait_for(task, 2)
    await verifier.stop()


async def test_a_draining_verifier_is_served_to_the_end(verifier: ScriptedVerifier) -> None:
    async with running(Drafter(verifier.port)):
        stream = await verifier.accepted()
        stream.send("about to stop")
        stream.send(StepBatch(opened=[opened()]))
        assert isinstance(await stream.receive(), DraftBatch)


async def test_each_draft_is_a_span_below_the_step_it_answers(
    verifier: ScriptedVerifier, spans: InMemorySpanExporter
) -> None:
    async with running(Drafter(verifier.port)):
        stream = await verifier.accepted()
        stream.send(StepBatch(opened=[opened(1, traceparent=TRACEPARENT), opened(2)]))
        await stream.receive()
        await stream.receive()
    drafts = spans.get_finished_spans()
    assert [span.name for span in drafts] == ["propose", "propose"]
    assert {format(span.parent.span_id, "016x") for span in drafts if span.parent} == {
        "0123456789abcdef"
    }
    attributes = drafts[0].attributes or {}
    assert attributes["outrider.family"] == "counting"
    assert (attributes["outrider.base_length"], attributes["outrider.draft_tokens"]) == (2, 2)


def test_drafts_and_skips_are_one_message_where_they_fit() -> None:
    """The verifier divides a message's drafting time by the length of its longest draft.

    A message with only skips would seem to travel for as long as the drafting took.
    """
    batch = DraftBatch([Proposal(1, 2, [5])] * 300, [Skip(2, 2)] * 212)
    assert list(grpc_transport._messages(batch)) == [batch]
    parts = list(grpc_transport._messages(DraftBatch(batch.proposals, [*batch.skips, Skip(3, 2)])))
    assert [len(part.proposals) + len(part.skips) for part in parts] == [300, 213]


def test_a_batch_is_divided_into_messages_that_the_verifier_accepts() -> None:
    """Deep windows of many sequences hold more tokens than a message may have."""
    sizes = [1024, 1, 700, 1024] * 200
    proposals = [Proposal(i, 2, [5] * size) for i, size in enumerate(sizes)]
    skips = [Skip(i, 2) for i in range(600)]
    parts = list(grpc_transport._messages(DraftBatch(proposals, skips)))
    for part in parts:
        assert drafts_from_proto(drafts_to_proto(part), 10) == part
    assert [each for part in parts for each in part.proposals] == proposals
    assert [each for part in parts for each in part.skips] == skips
    assert len(parts) < 2 * sum(sizes) / MAX_BATCH_TOKENS


async def test_it_rejoins_at_once_with_a_new_strategy_after_a_goodbye(
    verifier: ScriptedVerifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    # After a lost stream the drafter would first wait for an hour.
    monkeypatch.setattr("outrider.drafter.stream._BACKOFF_S", (3600.0, 3600.0))
    drafter = Drafter(verifier.port)
    async with running(drafter):
        stream = await verifier.accepted()
        stream.send(StepBatch(opened=[opened(tokens=(10, 11))]))
        await stream.receive()
        rejoining = asyncio.create_task(drafter.stream.rejoin())
        while isinstance(said := await stream.receive(), DraftBatch):
            pass
        assert said == "the drafter is stopping"
        assert await stream.receive() is None
        await asyncio.wait_for(rejoining, 30)
        assert drafter.families[0].is_closed
        stream = await verifier.accepted()
        stream.send(StepBatch(opened=[opened(tokens=(20, 21))]))
        assert await stream.receive() == DraftBatch([Proposal(1, 2, [22, 23])])
        assert len(drafter.families) == 2


async def test_rejoining_a_stream_that_waits_for_its_verifier_returns_at_once(
    verifier: ScriptedVerifier,
) -> None:
    await verifier.stop()
    drafter = Drafter(verifier.port)
    async with running(drafter):
        await asyncio.wait_for(drafter.stream.rejoin(), 30)
        await verifier.start()
        await verifier.accepted()
