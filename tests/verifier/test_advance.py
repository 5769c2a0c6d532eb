"""The engine's loop: the work of one `advance`, and the time for which its caller may sleep."""

import threading

import pytest

from outrider.protocol.draft_tokens_policy import DraftTokensPolicy
from outrider.protocol.messages import TokenRequest
from tests.verifier.fake_model import GREEDY, Client, ScriptedDrafter, TableModel, make_engine
from tests.virtual_time import VirtualClock
from verifier_svc.engine.config import EngineConfig
from verifier_svc.engine.loop import Engine


def patient_engine(clock: VirtualClock) -> tuple[Engine, TableModel]:
    """Return an engine that waits for every draft, even if that does not pay."""
    config = EngineConfig(DraftTokensPolicy("fixed", 4))
    return make_engine(eos_bias=-99, config=config, always_draft=True, clock=clock)


def test_an_engine_without_requests_may_sleep_until_something_is_posted() -> None:
    engine, model = make_engine()
    assert engine.advance() is None
    engine.post(lambda: engine.submit(TokenRequest([1], 2, GREEDY), Client()))
    assert [engine.advance() for _ in range(3)] == [0.0, 0.0, None]
    assert model.forward_count == 2


def test_an_engine_that_waits_for_a_draft_returns_the_time_left() -> None:
    clock = VirtualClock()
    engine, model = patient_engine(clock)
    drafter, client = ScriptedDrafter(engine), Client()
    sequence = engine.submit(TokenRequest([1, 2], 20, GREEDY), client)
    engine.drain_inbox()
    truth = model.greedy([1, 2], 20)
    drafter.propose(sequence.id, truth[:1])
    assert engine.advance() == 0.0
    held_s = engine.advance()
    assert held_s is not None
    assert 0.0 < held_s <= 0.005
    clock.sleep(held_s)
    wait_s = engine.advance()
    assert client.tokens == truth[:2]
    assert wait_s is not None
    assert 0.5 < wait_s <= 1.0
    assert model.forward_count == 1
    drafter.propose(sequence.id, truth[2:6])
    assert engine.advance() == 0.0
    assert sequence.tokens == [1, 2, *truth[:7]]


def test_a_request_cancelled_during_a_wait_leaves_an_idle_engine() -> None:
    clock = VirtualClock()
    engine, model = patient_engine(clock)
    drafter, client = ScriptedDrafter(engine), Client()
    sequence = engine.submit(TokenRequest([1, 2], 20, GREEDY), client)
    engine.drain_inbox()
    drafter.propose(sequence.id, model.greedy([1, 2], 1))
    assert engine.advance() == 0.0
    assert engine.advance() != 0.0
    engine.post(lambda: engine.cancel(sequence))
    assert engine.advance() is None
    assert client.tokens == model.greedy([1, 2], 2), "earlier tokens are delivered"


def test_a_post_wakes_a_sleeping_engine_and_a_stop_follows_earlier_posts() -> None:
    engine, model = make_engine(eos_bias=-99)
    client = Client()
    done = threading.Event()

    def collect(chunk: object) -> None:
        client(chunk)
        if len(client.tokens) == 5:
            done.set()

    thread = threading.Thread(target=engine.run)
    thread.start()
    engine.post(lambda: engine.submit(TokenRequest([1, 2], 5, GREEDY), collect))
    assert done.wait(60)
    ran: list[str] = []
    engine.post(lambda: ran.append("before"))
    engine.stop()
    thread.join(60)
    assert not thread.is_alive()
    assert ran == ["before"]
    assert client.tokens == model.greedy([1, 2], 5)


def test_an_inconsistent_pool_is_reported_once_per_idle_period(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine, _ = make_engine(eos_bias=-99)

    def serve_one() -> None:
        engine.submit(TokenRequest([1, 2], 2, GREEDY), Client())
        while engine.advance() is not None:
            pass

    def failures() -> float:
        registry = engine._metrics.registry
        labels = {"model_name": "fake"}
        return registry.get_sample_value("outrider:integrity_failures_total", labels) or 0.0

    serve_one()
    assert failures() == 0.0
    engine.pool._blank.pop()
    assert engine.advance() is None
    assert failures() == 0.0, "an engine that was idle before checks no pages"
    serve_one()
    assert failures() == 1.0
    [record] = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "a page is lost, or free twice" in record.getMessage()
    assert engine.advance() is None
    assert failures() == 1.0
    serve_one()
    assert failures() == 2.0
