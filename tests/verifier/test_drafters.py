"""Drafters join, leave and break the protocol, and requests choose among them."""

import re
from dataclasses import replace

import pytest

from outrider.errors import OutriderError, Reason
from outrider.grammar.kinds import FreeThought, Grammar, GrammarKind
from outrider.protocol.draft_messages import DraftBatch, Proposal
from outrider.protocol.messages import SpeculationOptions, TokenRequest
from outrider.protocol.model_info import Placement
from tests.verifier.fake_model import GREEDY, Client, ScriptedDrafter, exposition, make_engine
from tests.virtual_time import VirtualClock
from verifier_svc.drafts.roster import MOST_LOST


def request(prompt: list[int], max_tokens: int, **changes: object) -> TokenRequest:
    """Return a greedy request with some fields changed."""
    return replace(TokenRequest(prompt, max_tokens, GREEDY), **changes)


def test_when_a_drafter_leaves_another_of_its_family_takes_over() -> None:
    engine, _ = make_engine(eos_bias=-99)
    first = ScriptedDrafter(engine, "one", "same")
    second = ScriptedDrafter(engine, "two", "same")
    sequence = engine.submit(request([1, 2], 10), Client())
    engine.drain_inbox()
    assert [len(drafter.received) for drafter in (first, second)] == [1, 0]
    engine.drafting.leave(first.handle)
    engine.drain_inbox()
    assert second.received[0].opened[0].sequence_id == sequence.id
    infos = {info.drafter_id: info.connected for info in engine.drafting.roster.infos()}
    assert infos == {"two": True, "one": False}


def test_an_id_is_taken_while_its_drafter_is_connected() -> None:
    engine, _ = make_engine()
    first = ScriptedDrafter(engine, "model-1")
    with pytest.raises(OutriderError, match="a drafter with the id model-1 is connected") as caught:
        ScriptedDrafter(engine, "model-1")
    assert caught.value.reason is Reason.DRAFTER_ID_TAKEN
    engine.drafting.leave(first.handle)
    ScriptedDrafter(engine, "model-1")


def test_a_drafter_gets_no_more_sequences_than_its_hello_allows() -> None:
    engine, _ = make_engine(eos_bias=-99)
    drafter = ScriptedDrafter(engine, max_sequence_count=1)
    first = engine.submit(request([1, 2], 10), Client())
    engine.submit(request([3, 4], 10), Client())
    engine.drain_inbox()
    opened = [opened.sequence_id for batch in drafter.received for opened in batch.opened]
    assert opened == [first.id]


@pytest.mark.parametrize("thought", [None, FreeThought("<think>", "</think>")])
def test_a_drafter_that_requires_a_grammar_gets_no_other_sequence(
    thought: FreeThought | None,
) -> None:
    engine, _ = make_engine(eos_bias=-99)
    grammar = Grammar(GrammarKind.JSON_OBJECT, thought=thought)
    running = engine.submit(request([1, 2], 20, grammar=grammar), Client())
    engine.submit(request([3, 4], 20), Client())
    engine.step()
    drafter = ScriptedDrafter(engine, "grammar", "grammar", requires_grammar=True)
    ScriptedDrafter(engine, "any", "any")
    by_family = SpeculationOptions(drafter_family="grammar")
    later = engine.submit(request([5], 20, grammar=grammar), Client())
    engine.submit(request([6], 20, speculation=by_family), Client())
    for _ in range(4):
        engine.step()
    told = [each.sequence_id for batch in drafter.received for each in batch.opened]
    told += [each.sequence_id for batch in drafter.received for each in batch.verdicts]
    assert set(told) == {running.id, later.id}
    assert set(running.assignments) == {"grammar", "any"}


def test_the_verifiers_own_faults_put_no_drafter_in_quarantine() -> None:
    engine, _ = make_engine()
    for _ in range(4):
        drafter = ScriptedDrafter(engine)
        engine.drafting.reject(drafter.handle, OutriderError(Reason.INTERNAL, "a fault of ours"))


def test_a_quarantine_begins_with_the_third_violation_in_half_a_minute() -> None:
    clock = VirtualClock()
    clock.now = 0.0
    engine, _ = make_engine(clock=clock)
    sequence = engine.submit(request([1, 2], 10), Client())
    for clock.now in (0.0, 10.0, 31.0, 39.0):
        ScriptedDrafter(engine, "bad").send(Proposal(sequence.id, 5, [1]))
    clock.now = 68.9
    with pytest.raises(OutriderError, match="in quarantine for 1 s more") as caught:
        ScriptedDrafter(engine, "bad")
    assert caught.value.retry_after_s == pytest.approx(0.1)
    clock.now = 69.1
    ScriptedDrafter(engine, "bad")


def test_metrics_of_lost_drafters_are_dropped_in_time() -> None:
    clock = VirtualClock()
    clock.now = 0.0
    engine, model = make_engine(eos_bias=-99, clock=clock)
    stays, goes, comes_back = (
        ScriptedDrafter(engine, name, name) for name in ("stays", "goes", "comes-back")
    )
    sequence = engine.submit(request([1, 2], 40), Client())
    engine.drain_inbox()
    for drafter in (stays, goes, comes_back):
        drafter.propose(sequence.id, model.greedy([1, 2], 4))
        engine.step()
    for drafter in (goes, comes_back):
        engine.drafting.leave(drafter.handle)
    engine.drain_inbox()
    for name in ("stays", "goes", "comes-back"):
        assert f'drafter="{name}"' in exposition(engine)
    ScriptedDrafter(engine, "comes-back", "comes-back")
    clock.now = 601.0
    engine.drafting.leave(ScriptedDrafter(engine, "last").handle)
    assert 'drafter="goes"' not in exposition(engine)
    for name in ("stays", "comes-back"):
        assert f'drafter="{name}"' in exposition(engine)


def test_the_record_of_lost_drafters_is_bounded() -> None:
    engine, _ = make_engine()
    for i in range(300):
        engine.drafting.leave(ScriptedDrafter(engine, f"d{i}").handle)
    infos = engine.drafting.roster.infos()
    assert len(infos) == MOST_LOST
    assert infos[-1].drafter_id == "d299"


def test_the_metrics_of_lost_drafters_are_bounded() -> None:
    engine, _ = make_engine(eos_bias=-99)
    sequence = engine.submit(request([1, 2], 40), Client())
    for i in range(2 * MOST_LOST):
        drafter = ScriptedDrafter(engine, f"d{i}")
        engine.drafting.on_drafts(drafter.handle, DraftBatch([Proposal(sequence.id, 2, [1])]))
        engine.drafting.leave(drafter.handle)
    names = set(re.findall(r'drafter="(d\d+)"', exposition(engine)))
    assert names == {f"d{i}" for i in range(MOST_LOST, 2 * MOST_LOST)}


def test_a_drafter_has_the_metrics_of_one_family_and_place() -> None:
    """If a drafter names another family or place on each stream, only the latest has series."""
    engine, _ = make_engine(eos_bias=-99)
    sequence = engine.submit(request([1, 2], 40), Client())
    for i in range(5):
        place = Placement(f"place{i % 2}")
        drafter = ScriptedDrafter(engine, family=f"family{i // 2}", placement=place)
        engine.drafting.on_drafts(drafter.handle, DraftBatch([Proposal(sequence.id, 2, [1])]))
        series = re.findall(r"family=\"(\w+)\".*placement=\"(\w+)\"", exposition(engine))
        assert set(series) == {(f"family{i // 2}", f"place{i % 2}")}
        engine.drafting.leave(drafter.handle)


def test_a_request_chooses_its_drafter_by_id_or_family_or_none() -> None:
    engine, _ = make_engine()
    # The first drafter's id is the second drafter's family.
    drafters = [ScriptedDrafter(engine, "y", "x"), ScriptedDrafter(engine, "b", "y")]
    for options, expected in (
        (SpeculationOptions(), {"y", "b"}),
        (SpeculationOptions(drafter_family="y"), {"b"}),
        (SpeculationOptions(drafter_id="y"), {"y"}),
        (SpeculationOptions(enabled=False), set()),
        (SpeculationOptions(draft_tokens=0), set()),
    ):
        sequence = engine.submit(request([1], 5, speculation=options), Client())
        assert set(sequence.assignments) == expected
    assert len(drafters) == 2
    for options, message in (
        (
            SpeculationOptions(drafter_id="x"),
            "speculation.drafter_id: no drafter with the id x is connected",
        ),
        (
            SpeculationOptions(drafter_family="b"),
            "speculation.drafter_family: no drafter of the family b is connected",
        ),
    ):
        with pytest.raises(OutriderError, match=message):
            engine.submit(request([1], 5, speculation=options), Client())
