"""Verdicts leave after their step; chunks leave with the next forward, or at once without one."""

import pytest
from fake_model import Client, ScriptedDrafter, make_engine

from outrider.protocol.messages import SamplingParams, TokenRequest

GREEDY = SamplingParams(temperature=0.0)


def test_verdicts_leave_at_once_and_chunks_with_the_next_forward() -> None:
    engine, model = make_engine(eos_bias=-99)
    drafter, client = ScriptedDrafter(engine), Client()
    engine.submit(TokenRequest([1, 2], 8, GREEDY), client)
    known_at_forward: list[int] = []
    model.broken = lambda slices: known_at_forward.append(len(client.tokens))
    engine.step()
    assert drafter.received[-1].verdicts[0].new_token_ids == model.greedy([1, 2], 1)
    assert client.tokens == []
    engine.step()
    engine.step()
    assert known_at_forward == [0, 1, 2]


def test_without_a_next_forward_chunks_leave_at_once() -> None:
    engine, model = make_engine(eos_bias=-99)
    short = Client()
    long = Client()
    engine.submit(TokenRequest([1, 2], 1, GREEDY), short)
    waited_for = engine.submit(TokenRequest([1], 9, GREEDY), long)
    engine.step()
    assert short.tokens == []
    engine.cancel(waited_for)
    engine.step()
    assert short.tokens == model.greedy([1, 2], 1)
    last = Client()
    engine.submit(TokenRequest([3], 1, GREEDY), last)
    engine.step()
    assert last.tokens == model.greedy([3], 1)


def test_a_failed_engine_delivers_all_committed_tokens() -> None:
    engine, model = make_engine(eos_bias=-99)
    client = Client()
    engine.submit(TokenRequest([1, 2], 8, GREEDY), client)
    engine.step()
    engine.post(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.run()
    assert client.tokens == model.greedy([1, 2], 1)
