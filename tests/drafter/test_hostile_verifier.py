"""The drafter against a verifier that sends nonsense, and with a family that fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from outrider.drafter import stream as stream_module
from outrider.drafter.draft_sequence import DraftSequence
from outrider.errors import OutriderError, Reason
from outrider.protocol.draft_messages import DraftBatch, Proposal, StepBatch
from outrider.protocol.wire import drafts as wire_drafts
from outrider.v1 import drafts_pb2, verifier_pb2
from tests.drafter.counting_drafter import Counting, Drafter, opened, running
from tests.drafter.scripted_drafts import ScriptedVerifier
from tests.waiting import until

GARBAGE = b"\xff" * 30
SENSELESS = {
    "bytes that cannot be parsed": GARBAGE,
    "a token that the target lacks": wire_drafts.step_to_proto(
        StepBatch(opened=[opened(tokens=(4096,))])
    ),
    "no tokens": wire_drafts.step_to_proto(StepBatch(opened=[opened(tokens=())])),
    "a window without room": drafts_pb2.StepBatch(opened=[drafts_pb2.Opened(token_ids=[1])]),
    "a committed token that the target lacks": drafts_pb2.StepBatch(
        verdicts=[drafts_pb2.Verdict(new_token_ids=[2**32 - 1])]
    ),
}


def raw(message: bytes | drafts_pb2.StepBatch) -> bytes:
    if isinstance(message, bytes):
        return message
    return verifier_pb2.StreamDraftsResponse(step=message).SerializeToString()


async def test_an_invalid_message_ends_the_stream_and_it_reconnects(
    verifier: ScriptedVerifier, caplog: pytest.LogCaptureFixture
) -> None:
    drafter = Drafter(verifier.port)
    drafter.redial_at_once()
    async with running(drafter):
        stream = await verifier.accepted()
        for message in SENSELESS.values():
            stream.send(raw(message))
            stream = await verifier.accepted()
            stream.send(StepBatch(opened=[opened()]))
            assert await stream.receive() == DraftBatch([Proposal(1, 2, [12, 13])])
    assert caplog.text.count("the stream to 127.0.0.1") == len(SENSELESS)


async def test_a_nonsensical_verifier_is_redialled_with_a_growing_delay(
    verifier: ScriptedVerifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Welcome does not reset the delay; only a stream that lasts does."""
    delays: list[float] = []
    drafter = Drafter(verifier.port)

    async def note(seconds: float) -> None:
        delays.append(seconds)

    monkeypatch.setattr(drafter.stream, "_sleep", note)
    monkeypatch.setattr(stream_module.random, "uniform", lambda low, high: high)
    async with running(drafter):
        for _ in range(8):
            (await verifier.accepted()).send(GARBAGE)
        await until(lambda: len(delays) == 8)
        # Count the next stream as one that lasted a minute.
        monkeypatch.setattr(stream_module, "_GOOD_S", -1.0)
        (await verifier.accepted()).send(GARBAGE)
        await until(lambda: len(delays) == 9)
        monkeypatch.setattr(stream_module, "_GOOD_S", 60.0)
        for retry_s in (1e-9, 0.0, 1e9):
            error = OutriderError(Reason.OVERLOADED, "later", retry_after_s=retry_s)
            (await verifier.accepted()).send(error)
        await verifier.accepted()
    assert delays[:8] == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0]
    assert delays[8:12] == [0.1, 0.2, 0.4, 60.0]


async def test_a_family_that_cannot_be_made_is_retried_on_a_new_stream(
    verifier: ScriptedVerifier, caplog: pytest.LogCaptureFixture
) -> None:
    failures = iter([ZeroDivisionError("planted")])

    def make() -> Counting:
        for failure in failures:
            raise failure
        return Counting()

    async with running(Drafter(verifier.port, make=make)):
        await verifier.accepted()
    assert "ZeroDivisionError: planted" in caplog.text


async def test_a_lost_device_ends_the_process(verifier: ScriptedVerifier) -> None:
    class Lost(Counting):
        fatal = (ZeroDivisionError,)

        async def propose(
            self, sequences: Sequence[DraftSequence], interrupted: Callable[[], bool]
        ) -> None:
            raise ZeroDivisionError("planted")

    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        ended = tasks.create_task(_error_of(Drafter(verifier.port, make=Lost)))
        (await verifier.accepted()).send(StepBatch(opened=[opened()]))
    assert isinstance(ended.result(), ZeroDivisionError)


async def _error_of(drafter: Drafter) -> Exception | None:
    try:
        await drafter.stream.run()
    except ZeroDivisionError as error:
        return error
    return None
