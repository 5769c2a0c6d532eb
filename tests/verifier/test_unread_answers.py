"""A sequence that nobody reads takes no steps, places, pages or drafters' slots.

The sequence's text does not change.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import Reason
from outrider.protocol.messages import SamplingParams, TokenRequest
from tests.verifier.fake_model import (
    GREEDY,
    Client,
    ScriptedDrafter,
    exposition,
    finish,
    make_engine,
)
from verifier_svc.engine.config import EngineConfig
from verifier_svc.engine.loop import Engine
from verifier_svc.state.sequence import Sequence

SEEDED = SamplingParams(seed=11)


def submit(
    engine: Engine, sampling: SamplingParams = GREEDY, tenant: str = "", max_tokens: int = 40
) -> tuple[Sequence, Client]:
    client = Client()
    request = TokenRequest([1, 2, 3], max_tokens, sampling, tenant=tenant)
    return engine.submit(request, client), client


def text(sampling: SamplingParams) -> list[int]:
    """Return the text of an answer that is read."""
    engine, _ = make_engine(eos_bias=-99)
    _, client = submit(engine, sampling)
    finish(engine)
    return client.tokens


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafted"])
@pytest.mark.parametrize(("evicted", "every"), [(False, 1), (True, 2)], ids=["cached", "evicted"])
def test_pauses_leave_the_text_as_it_is(
    sampling: SamplingParams, drafts: bool, evicted: bool, every: int
) -> None:
    """A pause frees all pages; other sequences may take them before this sequence goes on."""
    expected = text(sampling)
    engine, _ = make_engine(eos_bias=-99, page_count=16)
    drafter = ScriptedDrafter(engine)
    sequence, client = submit(engine, sampling)
    for step in range(400):
        if sequence.id not in engine.sequences:
            break
        engine.drain_inbox()
        if drafts and sequence.id in drafter.length:
            known = drafter.length[sequence.id] - 3
            # The second guess is wrong.
            drafter.propose(sequence.id, [*expected[known : known + 1], 0], anew=True)
        engine.step()
        if step % every == 0 and sequence.id in engine.sequences:
            engine.pause(sequence)
            assert engine.pool.used_count == 0
            if evicted:
                other = engine.submit(TokenRequest([4, 5, 6], 60, GREEDY), Client())
                while other.id in engine.sequences:
                    engine.step()
            engine.resume(sequence)
            engine.drain_inbox()
            engine.advance()
    assert client.tokens == expected
    engine.pool.check_integrity()


def test_an_unread_sequence_takes_no_step_while_others_go_on() -> None:
    engine, model = make_engine(eos_bias=-99)
    unread, _ = submit(engine)
    other, client = submit(engine, max_tokens=10)
    engine.step()
    engine.pause(unread)
    length = len(unread.tokens)
    while other.id in engine.sequences:
        engine.advance()
    assert len(client.tokens) == 10
    assert len(unread.tokens) == length
    forwards = model.forward_count
    assert engine.advance() is None, "an engine that has only unread sequences sleeps"
    assert model.forward_count == forwards
    engine.resume(unread)
    finish(engine)
    assert len(unread.tokens) == 43


@pytest.mark.parametrize("floods", ["a", "ac"])
def test_unread_sequences_of_tenants_leave_all_places_to_another(floods: str) -> None:
    engine, _ = make_engine(eos_bias=-99, config=EngineConfig(max_sequences=4))
    flood = [submit(engine, tenant=name)[0] for name in floods for _ in range(8)]
    for _ in flood:
        engine.advance()
        for sequence in list(engine.scheduler.running.values()):
            engine.pause(sequence)
    assert not engine.scheduler.has_work
    small = [submit(engine, tenant="small")[0] for _ in range(4)]
    assert list(engine.scheduler.running) == [each.id for each in small]
    for sequence in flood:
        engine.cancel(sequence)
    finish(engine)


ACTS = st.sampled_from(["submit", "step", "leave", "read", "cancel", "join"])


@given(st.lists(st.tuples(ACTS, st.integers(0, 5)), max_size=40))
def test_unread_sequences_have_no_slots_at_drafters_and_are_counted(
    acts: list[tuple[str, int]],
) -> None:
    now = 0.0
    engine, _ = make_engine(eos_bias=-99, config=EngineConfig(max_sequences=3), clock=lambda: now)
    drafters = [ScriptedDrafter(engine, max_sequence_count=2)]
    sequences = [submit(engine)[0]]
    engine.step()
    for act, which in acts:
        now += 1.0
        sequence = sequences[which % len(sequences)]
        if act == "submit":
            sequences.append(submit(engine)[0])
        elif act == "join":
            drafters.append(ScriptedDrafter(engine, f"drafter {len(drafters)}"))
        elif act == "step":
            engine.advance()
        else:
            tell = {
                "leave": engine.pause,
                "read": engine.resume,
                "cancel": engine.cancel,
            }
            tell[act](sequence)
        engine.drain_inbox()
        unread = engine.scheduler.unread
        for drafter in drafters:
            name = drafter.handle.id
            slots = {each.id for each in engine.sequences.values() if name in each.assignments}
            assert drafter.handle.sequence_ids == slots
            assert slots.isdisjoint(unread)
        count = f'outrider:num_requests_unread{{model_name="fake"}} {len(unread)}.0'
        assert count in exposition(engine)
    for drafter in drafters:
        opened = [each.sequence_id for batch in drafter.received for each in batch.opened]
        assert len(opened) == len(set(opened)), "an id is opened once on a stream"


def test_a_drafter_with_one_slot_has_it_for_others_while_an_answer_is_unread() -> None:
    engine, _ = make_engine(eos_bias=-99)
    drafter = ScriptedDrafter(engine, max_sequence_count=1)
    unread, client = submit(engine)
    engine.step()
    engine.pause(unread)
    other, _ = submit(engine)
    assert drafter.handle.sequence_ids == {other.id}
    engine.cancel(other)
    engine.resume(unread)
    engine.step()
    assert drafter.handle.sequence_ids == {unread.id}
    drafter.propose(unread.id, [5], anew=True)
    finish(engine)
    assert drafter.error is None
    assert client.tokens == text(GREEDY)


def test_a_sequence_that_is_read_again_keeps_its_place_among_its_tenants() -> None:
    engine, _ = make_engine(eos_bias=-99, config=EngineConfig(max_sequences=1))
    first, _ = submit(engine)
    engine.step()
    engine.pause(first)
    second, third = submit(engine)[0], submit(engine)[0]
    engine.step()
    engine.resume(first)
    engine.cancel(second)
    engine.advance()
    assert list(engine.scheduler.running) == [first.id]
    engine.cancel(third)


@pytest.mark.parametrize("begun", [False, True], ids=["in the queue", "in the batch"])
def test_an_unread_sequence_can_be_cancelled_and_reading_it_then_does_nothing(begun: bool) -> None:
    engine, _ = make_engine(eos_bias=-99, config=EngineConfig(max_sequences=1))
    first, _ = submit(engine)
    second, client = submit(engine)
    sequence = first if begun else second
    engine.step()
    for _ in range(2):
        engine.pause(sequence)
    engine.cancel(sequence)
    engine.resume(sequence)
    engine.pause(sequence)
    finish(engine)
    assert not engine.scheduler.unread
    assert client.error is None


@pytest.mark.parametrize("floods", ["a", "ac"])
def test_of_too_many_unread_the_tenant_with_the_most_loses_its_longest_unread(floods: str) -> None:
    most = 1 + 2 * len(floods)
    engine, _ = make_engine(eos_bias=-99, config=EngineConfig(max_waiting=most))
    other, others = submit(engine, tenant="other")
    engine.pause(other)
    clients: dict[str, list[Client]] = {name: [] for name in floods}
    for _ in range(3):
        for name in floods:
            sequence, client = submit(engine, tenant=name)
            clients[name].append(client)
            engine.pause(sequence)
    engine.outbox.send_to_clients()
    for flood in clients.values():
        assert [client.error is not None for client in flood] == [True, False, False]
        assert flood[0].error is not None
        assert flood[0].error.reason is Reason.SLOW_READER
    assert others.error is None
    assert len(engine.scheduler.unread) == most


def test_the_time_unread_is_no_time_in_the_batch() -> None:
    now = 0.0
    engine, _ = make_engine(eos_bias=-99, clock=lambda: now)
    sequence, _ = submit(engine)
    engine.step()
    engine.pause(sequence)
    now = 50.0
    engine.resume(sequence)
    finish(engine)
    assert engine.scheduler.load_meter.load().sequence_s == pytest.approx(0.0, abs=1e-3)
    sequence, _ = submit(engine)
    engine.step()
    engine.pause(sequence)
    now = 99.0
    engine.cancel(sequence)
    assert engine.scheduler.load_meter.load().sequence_s == pytest.approx(0.0, abs=1e-3)
