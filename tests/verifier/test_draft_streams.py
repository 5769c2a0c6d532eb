"""How a step becomes messages to a drafter, and how much of what a drafter says is taken in."""

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any, cast

from fake_model import Client, make_engine

from outrider.messages import (
    Closed,
    CloseReason,
    DraftBatch,
    DraftDistribution,
    Hello,
    ModelInfo,
    Opened,
    Proposal,
    SamplingParams,
    Stage,
    StepBatch,
    TokenRequest,
    Verdict,
    Window,
)
from outrider.v1 import verifier_pb2
from outrider.wire import drafts as wire_drafts
from outrider.wire import model as wire_model
from verifier_svc.engine.engine_thread import EngineThread
from verifier_svc.streams import draft_streams


def opened(sequence_id: int, token_count: int) -> Opened:
    return Opened(
        sequence_id,
        [100_000] * token_count,
        SamplingParams(0.0),
        DraftDistribution.ONE_HOT,
        Window(8, 4),
        4,
    )


def test_prompts_too_long_for_one_message_come_in_several_before_what_became_of_them() -> None:
    step = StepBatch(
        opened=[opened(number, 500_000) for number in range(12)],
        verdicts=[Verdict(3, 500_001, [5], 0, 4)],
        closed=[Closed(4, CloseReason.ENDED)],
    )
    parts = list(draft_streams._messages(wire_drafts.step_to_proto(step)))
    assert all(part.ByteSize() <= draft_streams._MAX_MESSAGE_BYTES + 100 for part in parts)
    *before, last = [wire_drafts.step_from_proto(part, 200_000) for part in parts]
    assert [one.sequence_id for part in before for one in part.opened] == list(range(12))
    assert not any(part.verdicts or part.closed for part in before)
    assert (last.opened, last.verdicts, last.closed) == ([], step.verdicts, step.closed)


def test_what_fits_is_one_message() -> None:
    step = wire_drafts.step_to_proto(
        StepBatch(opened=[opened(1, 5)], closed=[Closed(2, CloseReason.ENDED)])
    )
    assert list(draft_streams._messages(step)) == [step]


class Listener:
    """Stands for the call's context, of which the stream only writes to."""

    async def write(self, message: object) -> None:
        pass


async def test_a_drafter_that_floods_waits_for_the_engine_and_loses_nothing() -> None:
    engine, model = make_engine(eos_bias=-99)
    entered, release, go, all_said = (
        threading.Event(),
        threading.Event(),
        asyncio.Event(),
        asyncio.Event(),
    )

    def stall(_: object) -> None:
        entered.set()
        release.wait(30)

    thread = EngineThread(lambda deliver: engine)
    await thread.built
    message = verifier_pb2.StreamDraftsRequest(
        drafts=wire_drafts.drafts_to_proto(DraftBatch([Proposal(1, 1, [5] * 100)] * 500))
    )
    said = 0

    async def requests() -> AsyncIterator[verifier_pb2.StreamDraftsRequest]:
        nonlocal said
        yield verifier_pb2.StreamDraftsRequest(
            hello=wire_drafts.hello_to_proto(Hello("loud", "loud", "f", 8))
        )
        await go.wait()
        for _ in range(200):
            said += 1
            yield message
        all_said.set()
        await asyncio.sleep(60)

    info = wire_model.model_to_proto(
        ModelInfo("fake", Stage.READY, "serving", "f", model.vocab_size, 64)
    )
    serving = asyncio.create_task(
        draft_streams.DraftStream(thread, requests(), cast(Any, Listener()), info).run()
    )
    async with asyncio.timeout(30):
        while await thread.call(lambda: not engine.drafting.roster.connected):  # noqa: ASYNC110  # another thread has no event
            await asyncio.sleep(0.01)
        # What it says is for a sequence that is over, as late messages are.
        thread.post(lambda: engine.submit(TokenRequest([1, 2], 2, SamplingParams(0.0)), Client()))
        while await thread.call(
            lambda: (
                engine.sequences or not engine.drafting.roster.connected["loud"].last_sequence_id
            )
        ):  # noqa: ASYNC110  # as above
            await asyncio.sleep(0.01)
        model.broken = stall
        thread.post(lambda: engine.submit(TokenRequest([1, 2], 2, SamplingParams(0.0)), Client()))
        assert await asyncio.to_thread(entered.wait, 5)
        go.set()
        await asyncio.sleep(0.5)
        most = draft_streams._MAX_UNTAKEN_BYTES // message.ByteSize() + 2
        assert 1 < said <= most < 100
        release.set()
        await all_said.wait()
    [drafter] = engine.drafting.roster.connected.values()
    assert await thread.call(lambda: drafter.taken_bytes) >= (200 - 1) * message.ByteSize()
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    await thread.stop()
