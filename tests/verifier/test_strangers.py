"""Useless drafters get few messages, however many they are, and keep no other drafter out.

All tests run in virtual time.
"""

from __future__ import annotations

from typing import Any

import pytest

from outrider.errors import OutriderError, Reason
from outrider.protocol.draft_messages import Hello
from outrider.protocol.messages import TokenRequest
from tests.verifier.fake_model import GREEDY, Client, ScriptedDrafter, make_engine
from tests.virtual_time import VirtualClock
from verifier_svc.drafts.roster import PLACES
from verifier_svc.engine.config import EngineConfig
from verifier_svc.engine.loop import Engine
from verifier_svc.state.sequence import Sequence

STEPS = 400


def crowd(engine: Engine, count: int) -> list[ScriptedDrafter]:
    engine.drafting.roster.max_drafters = count + 1
    return [ScriptedDrafter(engine, f"s{i}", f"s{i}") for i in range(count)]


def submit(engine: Engine) -> Sequence:
    sequence = engine.submit(TokenRequest([1, 2], STEPS, GREEDY), Client())
    engine.drain_inbox()
    return sequence


def right(engine: Engine, sequence: Sequence) -> list[int]:
    """Return the next 8 tokens of the target's greedy text."""
    model: Any = engine.model
    tokens: list[int] = model.greedy(sequence.tokens, 8)
    return tokens


def make(clock: VirtualClock, forward_s: float = 0.01) -> Engine:
    engine, model = make_engine(eos_bias=-99, page_count=512, clock=clock)
    model.broken = lambda slices: clock.sleep(forward_s)
    return engine


def test_silent_drafters_get_few_messages_and_no_wait() -> None:
    clock = VirtualClock()
    engine = make(clock)
    count = 60
    strangers = crowd(engine, count)
    sequence = submit(engine)
    began = clock()
    while sequence.id in engine.sequences:
        clock.step(engine)
        assert len(sequence.assignments) <= PLACES
    assert clock() - began == pytest.approx(STEPS * 0.01)
    messages = sum([len(stranger.received) for stranger in strangers])
    # Each stranger gets a few messages once; afterwards a few strangers are probed at times.
    assert messages <= 12 * count
    assert messages <= (PLACES + 1) * STEPS


@pytest.mark.parametrize("answers", [False, True])
def test_a_good_drafter_gets_its_chance_among_strangers(answers: bool) -> None:
    """The good drafter joins last. The strangers are silent, or skip for ever."""
    clock = VirtualClock()
    engine = make(clock)
    strangers = crowd(engine, 20)
    good = ScriptedDrafter(engine, "good", "good")
    for _ in range(8):
        sequence = submit(engine)
        while sequence.id in engine.sequences:
            for stranger in strangers if answers else []:
                if stranger.handle.id in sequence.assignments and stranger.length.get(sequence.id):
                    stranger.skip(sequence.id)
            if "good" in sequence.assignments and sequence.id in good.length:
                good.propose(sequence.id, right(engine, sequence), anew=True)
            clock.step(engine)
    assert good.handle.proven
    assert "good" in submit(engine).assignments
    assert good.handle.accepted_count > 0


@pytest.mark.parametrize("holders", ["a", "ac"])
def test_a_holder_of_too_many_drafters_is_refused_by_the_limits_name_and_others_join(
    holders: str,
) -> None:
    engine, _ = make_engine(config=EngineConfig(max_drafters=8))

    def join(name: str, source: str) -> None:
        engine.drafting.join(Hello(name, name, "f", 8), lambda message: None, source=source)

    for name in holders:
        join(f"{name}1", name)
        join(f"{name}2", name)
        full = rf"2 drafters of {name} .*of --max-drafters"
        with pytest.raises(OutriderError, match=full) as caught:
            join(f"{name}3", name)
        assert caught.value.reason is Reason.OVERLOADED
    join("b1", "b")
    engine.drafting.leave(engine.drafting.roster.connected["a1"])
    join("a3", "a")


def test_a_drafter_that_falls_silent_is_replaced_until_it_answers_again() -> None:
    """Two drafters of a family serve two sequences. If one drafter hangs, the other serves both."""
    clock = VirtualClock()
    engine = make(clock)
    drafters = [ScriptedDrafter(engine, name, "family") for name in "ab"]
    for drafter in drafters:
        drafter.prove()
    sequences = [submit(engine), submit(engine)]
    hanging, answering = drafters
    for _ in range(30):
        for sequence in sequences:
            if sequence.id in answering.length:
                answering.propose(sequence.id, right(engine, sequence), anew=True)
        clock.step(engine)
    assert hanging.handle.silent
    assert all(answering.handle.id in sequence.assignments for sequence in sequences)
    hanging.send()
    assert not hanging.handle.silent
    assert hanging.handle.id in submit(engine).assignments


def test_a_drafter_on_trial_neither_displaces_a_proven_drafter_nor_is_waited_for() -> None:
    """The drafter on trial promises more than the proven one, is quicker, and answers only once."""
    clock = VirtualClock()
    engine = make(clock)
    good = ScriptedDrafter(engine, "good", "good")
    good.prove()
    hopeful = ScriptedDrafter(engine, "hopeful", "hopeful")
    sequence = submit(engine)
    began = clock()
    hopeful.propose(sequence.id, right(engine, sequence), anew=True)
    for _ in range(30):
        good.propose(sequence.id, right(engine, sequence), anew=True)
        clock.step(engine)
    assert sequence.stats.forward_count == 30
    assert clock() - began == pytest.approx(30 * 0.01)
    assert good.handle.accepted_count >= 100


def test_a_drafter_that_failed_its_trial_is_told_of_a_sequence_once() -> None:
    clock = VirtualClock()
    engine = make(clock)
    stranger = ScriptedDrafter(engine, "stranger", "stranger")
    sequence = submit(engine)
    while not stranger.handle.is_doubtful:
        clock.step(engine)
    assert not stranger.handle.silent
    engine.cancel(sequence)
    submit(engine)
    opened = [each.sequence_id for batch in stranger.received for each in batch.opened]
    assert len(opened) == len(set(opened)) == 2
