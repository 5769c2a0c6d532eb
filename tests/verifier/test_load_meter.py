"""A verifier reports its load, and after what time refused callers should return."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc
import pytest

from outrider.errors import OutriderError
from outrider.process.network import rpc
from outrider.protocol.messages import TokenRequest
from outrider.protocol.model_info import Load
from outrider.protocol.wire import model as wire_model
from outrider.protocol.wire import requests as wire_requests
from outrider.v1 import verifier_pb2
from outrider.v1.verifier_pb2_grpc import VerifierServiceStub
from tests.verifier.fake_model import GREEDY, Client, finish, make_engine
from tests.verifier.served_engine import verifier
from tests.waiting import until
from verifier_svc.engine.config import EngineConfig
from verifier_svc.engine.loop import Engine
from verifier_svc.policy.forward_cost import ForwardCost


def submit(engine: Engine, max_tokens: int = 4) -> None:
    engine.submit(TokenRequest([1, 2], max_tokens, GREEDY), Client())


def test_the_places_of_ended_sequences_count_as_taken_while_others_wait() -> None:
    config = EngineConfig(max_sequences=4, max_waiting=8)
    engine, _ = make_engine(eos_bias=-99, config=config)
    for max_tokens in (1, 1, 1, 9, 9, 9):
        submit(engine, max_tokens)
    engine.step()
    assert len(engine.scheduler.running) == 1
    load = engine.scheduler.load_meter.load()
    assert (load.running, load.waiting, load.places) == (3, 0, 4)
    for _ in range(3):
        submit(engine, 9)
    load = engine.scheduler.load_meter.load()
    assert (load.running, load.waiting, load.places) == (4, 2, 4)


def test_the_pages_that_sequences_hold_are_reported() -> None:
    engine, _ = make_engine(eos_bias=-99)
    submit(engine)
    engine.step()
    assert engine.load().kv_cache_usage == engine.pool.used_count / engine.pool.page_count > 0
    finish(engine)
    assert engine.load().kv_cache_usage == 0.0


class Clock:
    """A clock that advances by a millisecond each time it is read."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        self.seconds += 0.001
        return self.seconds


def test_the_load_counts_the_batch_and_the_queue() -> None:
    config = EngineConfig(max_sequences=2, max_waiting=5)
    engine, _ = make_engine(eos_bias=-99, config=config)
    meter = engine.scheduler.load_meter
    assert meter.load() == Load(0, 0, 2, 5, None)
    for _ in range(4):
        submit(engine)
    assert meter.load() == Load(2, 2, 2, 5, None)
    finish(engine)
    load = meter.load()
    assert (load.running, load.waiting) == (0, 0)
    assert load.sequence_s is not None


def test_the_time_of_sequences_follows_the_recent_ones() -> None:
    engine, _ = make_engine(eos_bias=-99, clock=Clock())
    meter = engine.scheduler.load_meter

    def time_of(max_tokens: int, count: int) -> float:
        for _ in range(count):
            submit(engine, max_tokens)
            finish(engine)
        seconds = meter.load().sequence_s
        assert seconds is not None
        return seconds

    short_s = time_of(4, 1)
    assert time_of(4, 10) == pytest.approx(short_s, rel=0.2)
    long_s = time_of(40, 60)
    assert 5 * short_s < long_s < 20 * short_s


def meter_with_cost(first_s: float, full_s: float) -> tuple[Engine, ForwardCost]:
    """Return an engine of 8 places, with these times of forwards of one and eight sequences."""
    config = EngineConfig(max_sequences=8, max_waiting=8)
    engine, _ = make_engine(eos_bias=-99, config=config)
    engine.cost.calibrate(1, 1, first_s)
    engine.cost.calibrate(8, 8, full_s)
    return engine, engine.cost


def test_sequences_that_ran_alone_are_timed_as_in_a_full_batch() -> None:
    """A burst on an idle verifier must not seem to be served as fast as a single request."""
    engine, cost = meter_with_cost(0.01, 0.08)
    submit(engine, 40)
    finish(engine)
    seconds = engine.load().sequence_s
    assert seconds is not None
    forwards = 40
    assert seconds == pytest.approx(forwards * cost.estimate(8, 8), rel=0.1)
    assert seconds > 4 * forwards * cost.estimate(1, 1)


def test_before_the_first_answer_the_trial_forwards_say_how_long_it_takes() -> None:
    engine, cost = meter_with_cost(0.01, 0.08)
    assert engine.load().sequence_s == pytest.approx(128 * cost.estimate(8, 8))


def test_sequences_that_took_longer_than_predicted_count_as_measured() -> None:
    engine, _ = meter_with_cost(1e-6, 1e-6)
    engine.scheduler.load_meter._sequence_s = 5.0
    assert engine.load().sequence_s == 5.0


def test_a_refused_caller_is_told_how_long_the_queue_takes() -> None:
    engine, _ = make_engine(
        eos_bias=-99, config=EngineConfig(max_sequences=1, max_waiting=3), clock=Clock()
    )
    submit(engine)
    finish(engine)
    engine.scheduler.load_meter._sequence_s = 5.0
    for _ in range(4):
        submit(engine)
    with pytest.raises(OutriderError, match="3 requests are waiting") as caught:
        submit(engine)
    assert caught.value.retry_after_s == 20.0
    finish(engine)


def test_an_impossible_load_does_no_harm() -> None:
    proto = verifier_pb2.GetModelResponse(stage=verifier_pb2.MODEL_STAGE_READY)
    proto.load.running_count = -5
    load = wire_model.model_from_proto(proto).load
    assert load == Load(0, 0, 1, 0)
    assert load.wait_s() == 0.0


async def test_what_nobody_waits_for_leaves_the_queue_and_the_batch() -> None:
    request = wire_requests.request_to_proto(TokenRequest([1, 2], 1900, GREEDY))
    config = EngineConfig(max_sequences=1)
    async with (
        verifier(eos_bias=-99, config=config, page_count=512, context_length=2000) as served,
        rpc.dial(served.address) as channel,
    ):
        engine, stub = served.engine, VerifierServiceStub(channel)
        model: Any = engine.model
        model.broken = lambda _: time.sleep(0.01)

        async def ask() -> None:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                _ = [each async for each in stub.GenerateTokens(request, timeout=0.3)]
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED

        asking = asyncio.gather(*(ask() for _ in range(3)))
        await asyncio.sleep(0.15)
        busy = await served.thread.call(engine.scheduler.load_meter.load)
        assert (busy.running, busy.waiting) == (1, 2)
        await asking
        # The clients' cancellations may still be on their way.
        await until(lambda: served.thread.call(lambda: not engine.sequences))
        assert await served.thread.call(lambda: engine.pool.used_count) == 0
