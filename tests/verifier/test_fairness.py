"""Fairness: a tenant's flood neither starves another tenant nor keeps it out of the queue."""

from __future__ import annotations

import pytest

from outrider.errors import OutriderError, Reason
from outrider.protocol.messages import TokenRequest
from tests.verifier.fake_model import EOS, GREEDY, Client, finish, make_engine
from verifier_svc.engine.config import EngineConfig
from verifier_svc.engine.loop import Engine
from verifier_svc.state.sequence import Sequence


def submit(
    engine: Engine, tenant: str, count: int = 1, max_tokens: int = 4
) -> tuple[list[Sequence], list[Client]]:
    clients = [Client() for _ in range(count)]
    request = TokenRequest([1, 2], max_tokens, GREEDY, tenant=tenant)
    return [engine.submit(request, client) for client in clients], clients


@pytest.mark.parametrize("floods", ["a", "ac"])
def test_a_tenant_with_one_request_takes_a_place_from_a_flood_at_once(floods: str) -> None:
    """Each choice of a request with `n` is a sequence, so a single request can be a flood."""
    engine, _ = make_engine(eos_bias=-99, config=EngineConfig(max_sequences=3))
    flood, clients = [], []
    for name in floods:
        sequences, readers = submit(engine, name, 20)
        flood.append(sequences)
        clients += readers
    engine.step()
    [victim], [client] = submit(engine, "victim")
    oldest = [flood[0][0].id, flood[-1][0 if floods == "ac" else 1].id]
    assert list(engine.scheduler.running) == [*oldest, victim.id], "the youngest lost its place"
    engine.step()
    assert len(victim.tokens) == 3
    finish(engine)
    assert len(client.tokens) == 4
    assert {len(each.tokens) for each in clients} == {4}


def test_a_place_is_taken_only_from_a_tenant_with_two_more() -> None:
    """With any smaller difference, two tenants could take a place from each other in turns."""
    engine, _ = make_engine(eos_bias=-99, config=EngineConfig(max_sequences=3))
    submit(engine, "a", 3)
    submit(engine, "b", 3)
    assert engine.scheduler.tenants == {"a": 2, "b": 1}
    assert engine.scheduler.preemption_count == 1
    engine.step()
    submit(engine, "a", 3)
    assert engine.scheduler.tenants == {"a": 2, "b": 1}
    assert engine.scheduler.preemption_count == 1
    submit(engine, "c")
    assert engine.scheduler.tenants == {"a": 1, "b": 1, "c": 1}
    finish(engine)


def test_a_full_queue_takes_another_tenants_request_and_drops_the_youngest() -> None:
    engine, _ = make_engine(eos_bias=-99, config=EngineConfig(max_sequences=1, max_waiting=4))
    flood, clients = submit(engine, "flood", 5)
    [victim], [answer] = submit(engine, "victim")
    dropped = clients[-1]
    finish(engine)
    assert dropped.error is not None
    assert dropped.error.reason is Reason.OVERLOADED
    assert [client.error for client in clients[:-1]] == [None] * 4
    assert len(answer.tokens) == 4
    assert victim.id > flood[-1].id


def test_a_request_that_began_elsewhere_is_not_dropped() -> None:
    engine, _ = make_engine(eos_bias=-99, config=EngineConfig(max_sequences=1, max_waiting=4))
    _, clients = submit(engine, "flood", 4)
    begun = Client()
    engine.submit(TokenRequest([1, 2], 4, GREEDY, tenant="flood", committed=[1]), begun)
    submit(engine, "victim")
    finish(engine)
    assert begun.error is None
    assert clients[-1].error is not None


def test_a_refused_request_drops_nobody() -> None:
    engine, _ = make_engine(eos_bias=-99, config=EngineConfig(max_sequences=1, max_waiting=2))
    _, clients = submit(engine, "flood", 3)
    # Sequences that have started may exceed the queue's bound for new sequences, up to twice this
    # bound.
    for _ in range(2):
        clients.append(Client())
        begun = TokenRequest([1, 2], 4, GREEDY, tenant="flood", committed=[1])
        engine.submit(begun, clients[-1])
    with pytest.raises(OutriderError, match="must not end the sequence"):
        engine.submit(TokenRequest([1, 2], 4, GREEDY, tenant="victim", committed=[EOS]), Client())
    finish(engine)
    assert [client.error for client in clients] == [None] * 5


def test_two_flooding_tenants_do_not_displace_each_other_in_turns() -> None:
    engine, _ = make_engine(eos_bias=-99, config=EngineConfig(max_sequences=1, max_waiting=4))
    submit(engine, "a", 5)
    submit(engine, "b", 2)
    for tenant in ("a", "b"):
        with pytest.raises(OutriderError):
            submit(engine, tenant)


def test_a_tenant_with_few_pages_takes_them_from_the_one_with_the_most() -> None:
    engine, _ = make_engine(eos_bias=-99, page_count=12, page_size=4)
    clients = [Client() for _ in range(4)]
    for number, each in enumerate(clients):
        prompt = [number, 2, 3, 4, 5, 6]  # prompts that begin alike would share pages
        engine.submit(TokenRequest(prompt, 20, GREEDY, tenant="flood"), each)
    while engine.pool.free_count:
        engine.step()
        engine.drain_inbox()
    youngest = list(engine.scheduler.running.values())[-1]
    [small], [client] = submit(engine, "small")
    assert small.id in engine.scheduler.running
    assert youngest.id not in engine.scheduler.running
    finish(engine)
    assert len(client.tokens) == 4
    assert {len(each.tokens) for each in clients} == {20}


def test_pages_are_not_taken_from_a_tenant_that_would_then_have_less() -> None:
    engine, _ = make_engine(eos_bias=-99, page_count=12, page_size=4)
    for _ in range(2):
        engine.submit(TokenRequest([1] * 20, 4, GREEDY, tenant="a"), Client())
    large = engine.submit(TokenRequest([2] * 30, 4, GREEDY, tenant="b"), Client())
    assert large.id not in engine.scheduler.running
    assert engine.scheduler.preemption_count == 0
    finish(engine)


def test_a_sequence_that_grows_takes_pages_from_the_tenant_with_the_most() -> None:
    """The small tenant's sequence is the youngest of all, and keeps its pages."""
    engine, _ = make_engine(eos_bias=-99, page_count=16, page_size=4)
    flood, _ = submit(engine, "flood", 5, max_tokens=30)
    [small], _ = submit(engine, "small", max_tokens=30)
    while engine.scheduler.preemption_count == 0:
        engine.step()
        engine.drain_inbox()
    assert small.id in engine.scheduler.running
    assert flood[-1].id not in engine.scheduler.running
    finish(engine)


def test_a_place_is_not_taken_for_a_sequence_whose_pages_are_not_there() -> None:
    """The place would stay empty, and the preempted sequence could not come back."""
    engine, _ = make_engine(
        eos_bias=-99, page_count=24, page_size=4, config=EngineConfig(max_sequences=2)
    )
    submit(engine, "a", 2, max_tokens=30)
    engine.step()
    large = engine.submit(TokenRequest([2] * 94, 2, GREEDY, tenant="b"), Client())
    for _ in range(10):
        engine.step()
        engine.drain_inbox()
    assert engine.scheduler.tenants == {"a": 2}
    assert engine.scheduler.preemption_count == 0
    finish(engine)
    assert len(large.tokens) == 96


def held(engine: Engine) -> dict[str, int]:
    """Return the number of pages of each tenant's running sequences."""
    return dict(engine.scheduler._pages_held())


@pytest.mark.parametrize(("prompt_length", "is_admitted"), [(23, True), (27, False)])
def test_a_tenant_that_loses_pages_keeps_as_many_as_the_other_gets(
    prompt_length: int, is_admitted: bool
) -> None:
    """With equal shares nobody can take pages back; otherwise both would take them in turns."""
    engine, _ = make_engine(eos_bias=-99, page_count=12, page_size=4)
    for number in range(6):
        prompt = [number, 2, 3, 4, 5, 6]
        engine.submit(TokenRequest(prompt, 1, GREEDY, tenant="flood"), Client())
    assert held(engine) == {"flood": 12}
    prompt = [5] * prompt_length
    small = engine.submit(TokenRequest(prompt, 1, GREEDY, tenant="small"), Client())
    assert (small.id in engine.scheduler.running) is is_admitted
    assert held(engine) == ({"flood": 6, "small": 6} if is_admitted else {"flood": 12})
    finish(engine)
