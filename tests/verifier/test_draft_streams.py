"""Messages of a draft stream: how a step is split, and how much of a flood the verifier reads."""

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from outrider.drafter.step_queue import MAX_FEATURE_BYTES
from outrider.errors import OutriderError
from outrider.protocol.draft_messages import (
    Closed,
    DraftBatch,
    Features,
    Hello,
    Opened,
    Proposal,
    SparseDistribution,
    StepBatch,
    Verdict,
    Window,
)
from outrider.protocol.messages import DraftDistribution, SamplingParams, TokenRequest
from outrider.protocol.model_info import ModelInfo, Stage
from outrider.protocol.wire import drafts as wire_drafts
from outrider.protocol.wire import model as wire_model
from outrider.v1 import drafts_pb2, verifier_pb2
from tests.verifier.fake_model import Client, make_engine
from tests.waiting import until
from verifier_svc.engine.engine_thread import EngineThread
from verifier_svc.state.drafter import MOST_ANSWERS
from verifier_svc.streams import drafter_streams, unread_steps


def opened(sequence_id: int, token_count: int) -> Opened:
    """Return the announcement of a sequence with a prompt of `token_count` tokens."""
    prompt = [100_000] * token_count
    one_hot = DraftDistribution.ONE_HOT
    return Opened(sequence_id, prompt, SamplingParams(0.0), one_hot, Window(8, 4), 4)


def test_long_prompts_are_split_over_messages_and_precede_verdicts() -> None:
    step = StepBatch(
        opened=[opened(number, 500_000) for number in range(12)],
        verdicts=[Verdict(3, 500_001, [5], 0, 4)],
        closed=[Closed(4)],
    )
    parts = list(drafter_streams._messages(wire_drafts.step_to_proto(step)))
    assert all(part.ByteSize() <= drafter_streams._MAX_MESSAGE_BYTES + 100 for part in parts)
    *before, last = [wire_drafts.step_from_proto(part, 200_000) for part in parts]
    assert [one.sequence_id for part in before for one in part.opened] == list(range(12))
    assert not any(part.verdicts or part.closed for part in before)
    assert (last.opened, last.verdicts, last.closed) == ([], step.verdicts, step.closed)


def test_features_are_split_over_messages_and_precede_their_verdicts() -> None:
    row = bytes(2**20)
    step = StepBatch(
        opened=[opened(1, 10)],
        features=[Features(1, at, row) for at in range(9)],
        verdicts=[Verdict(1, 11, [5], 0, 4)],
    )
    parts = list(drafter_streams._messages(wire_drafts.step_to_proto(step)))
    assert all(part.ByteSize() <= 4 * 2**20 for part in parts)
    first, *between, last = [wire_drafts.step_from_proto(part, 200_000) for part in parts]
    assert first == StepBatch(opened=step.opened)
    assert [one for part in between for one in part.features] == step.features
    assert last == StepBatch(verdicts=step.verdicts)


async def test_a_drafter_that_does_not_read_loses_features_and_no_verdicts() -> None:
    unread = unread_steps.UnreadSteps()
    half = MAX_FEATURE_BYTES // 2 + 1
    for length in range(11, 16):
        verdict = Verdict(1, length, [5], 0, 4)
        unread.put(StepBatch(features=[Features(1, length, bytes(half))], verdicts=[verdict]))
    read = [step for _ in range(5) if (step := await unread.get())]
    assert [one.first_position for step in read for one in step.features] == [11, 12]
    assert [one.committed_length for step in read for one in step.verdicts] == [11, 12, 13, 14, 15]
    unread.put(StepBatch(features=[Features(1, 16, bytes(8))]))
    step = await unread.get()
    assert step is not None
    assert step.features


async def test_a_reader_gets_the_error_before_the_steps_that_it_left_unread() -> None:
    unread = unread_steps.UnreadSteps()
    for length in range(unread_steps.MAX_UNREAD + 1):
        unread.put(StepBatch(verdicts=[Verdict(1, length, [5], 0, 4)]))
    with pytest.raises(OutriderError, match="1024 steps are unread"):
        await unread.get()


async def test_the_end_of_a_stream_is_read_as_none() -> None:
    unread = unread_steps.UnreadSteps()
    unread.end()
    unread.put(StepBatch(closed=[Closed(1)]))
    assert await unread.get() is None


class Listener:
    """A call context that drops all messages of the verifier."""

    async def write(self, message: object) -> None:
        pass

    def peer(self) -> str:
        return "ipv4:127.0.0.1:5000"


FLOOD_MESSAGES = 200
SERVED = ModelInfo("fake", Stage.READY, "serving", "f", 64, 64)


class Flood:
    """A drafter that introduces itself and, after `go`, sends many messages of stale drafts."""

    def __init__(self) -> None:
        drafts = wire_drafts.drafts_to_proto(DraftBatch([Proposal(1, 1, [5] * 500)] * 30))
        self.message = verifier_pb2.StreamDraftsRequest(drafts=drafts)
        self.go = asyncio.Event()
        self.all_sent = asyncio.Event()
        self.sent_count = 0

    async def requests(self) -> AsyncIterator[verifier_pb2.StreamDraftsRequest]:
        hello = wire_drafts.hello_to_proto(Hello("loud", "loud", "f", 8))
        yield verifier_pb2.StreamDraftsRequest(hello=hello)
        await self.go.wait()
        for _ in range(FLOOD_MESSAGES):
            self.sent_count += 1
            yield self.message
        self.all_sent.set()
        await asyncio.sleep(60)


async def test_a_drafter_that_floods_waits_for_the_engine_and_loses_nothing() -> None:
    engine, model = make_engine(eos_bias=-99)
    flood = Flood()
    entered = threading.Event()
    release = threading.Event()

    def stall(_: object) -> None:
        entered.set()
        release.wait(30)

    def submit() -> None:
        engine.submit(TokenRequest([1, 2], 2, SamplingParams(0.0)), Client())

    thread = EngineThread(lambda deliver: engine)
    await thread.built
    info = replace(SERVED, vocab_size=model.vocab_size)
    stream = drafter_streams.DrafterStream(
        thread, flood.requests(), cast(Any, Listener()), wire_model.model_to_proto(info)
    )
    serving = asyncio.create_task(stream.run())
    connected = engine.drafting.roster.connected
    async with asyncio.timeout(60):
        await until(lambda: thread.call(lambda: connected))
        # Like late messages, the flood's drafts are for a sequence that has ended.
        thread.post(submit)
        await until(
            lambda: thread.call(lambda: connected["loud"].last_sequence_id and not engine.sequences)
        )
        model.broken = stall
        thread.post(submit)
        assert await asyncio.to_thread(entered.wait, 30)
        # The stream bounds its waiting messages, whatever the engine allows.
        connected["loud"].proposals_left = MOST_ANSWERS
        flood.go.set()
        await asyncio.sleep(0.5)
        message_bytes = flood.message.ByteSize()
        most = drafter_streams._MAX_UNTAKEN_BYTES // message_bytes + 2
        assert 1 < flood.sent_count <= most < 100
        release.set()
        await flood.all_sent.wait()
    [drafter] = connected.values()
    taken_bytes = await thread.call(lambda: drafter.taken_bytes)
    assert taken_bytes >= (FLOOD_MESSAGES - 1) * message_bytes
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    await thread.stop()


async def test_the_event_loop_does_not_check_a_large_messages_distributions() -> None:
    """A check takes some 10 µs for each of 16,384 distributions; every client would wait for it."""
    checked_by: list[threading.Thread] = []
    convert = wire_drafts.drafts_from_proto

    def watched(proto: drafts_pb2.DraftBatch, vocab_size: int) -> DraftBatch:
        checked_by.append(threading.current_thread())
        return convert(proto, vocab_size)

    stream = drafter_streams.DrafterStream(
        cast(Any, None), cast(Any, None), cast(Any, Listener()), wire_model.model_to_proto(SERVED)
    )
    sure = SparseDistribution(np.array([5]), np.array([1.0]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire_drafts, "drafts_from_proto", watched)
        for count in (1, 1024):
            proposal = Proposal(1, 1, [5] * count, [], [sure] * count)
            proto = wire_drafts.drafts_to_proto(DraftBatch([proposal]))
            assert await stream._checked(proto, proto.ByteSize()) == DraftBatch([proposal])
    small, large = checked_by
    assert small is threading.current_thread()
    assert large is not small
