"""The engine survives senseless drafts and too many answers, and ends only the sender's stream."""

from dataclasses import replace

import pytest

from outrider.errors import OutriderError, Reason
from outrider.protocol.draft_messages import DraftBatch, Proposal, Skip
from outrider.protocol.draft_tokens_policy import DraftTokensPolicy
from outrider.protocol.limits import MAX_BATCH_ENTRIES
from outrider.protocol.messages import SamplingParams, SpeculationOptions, TokenRequest
from tests.verifier.fake_model import Client, ScriptedDrafter, make_engine
from tests.virtual_time import VirtualClock
from verifier_svc.engine.config import EngineConfig
from verifier_svc.state.drafter import MOST_ANSWERS, held_bytes
from verifier_svc.streams import drafter_streams


def request(prompt: list[int], max_tokens: int) -> TokenRequest:
    return TokenRequest(prompt, max_tokens, SamplingParams(temperature=0.0))


@pytest.mark.parametrize("opened", [0, 1])
def test_a_message_for_a_sequence_never_announced_is_a_violation(opened: int) -> None:
    """No delay explains an id above the last id that was announced to the drafter."""
    for batch in (
        DraftBatch([Proposal(opened + 1, 2, [1])]),
        DraftBatch(skips=[Skip(opened + 1, 2)]),
    ):
        engine, _ = make_engine()
        drafter = ScriptedDrafter(engine)
        for _ in range(opened):
            engine.submit(request([1, 2], 8), Client())
        undrafted = SpeculationOptions(enabled=False)
        engine.submit(replace(request([1, 2], 8), speculation=undrafted), Client())
        engine.drafting.on_drafts(drafter.handle, batch)
        engine.drain_inbox()
        assert drafter.error is not None
        assert drafter.error.reason is Reason.PROTOCOL_VIOLATION
        field = f"drafts.{'proposals' if batch.proposals else 'skips'}[0].sequence_id"
        bound = f"must be one that was opened, at most {opened}, not {opened + 1}"
        assert drafter.error.message == f"{field} {bound}"


def test_a_fault_in_processing_a_message_costs_its_sender_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine, model = make_engine(eos_bias=-99)
    unlucky = ScriptedDrafter(engine, "unlucky", "unlucky")
    other = ScriptedDrafter(engine, "other", "other")
    client = Client()
    sequence = engine.submit(request([1, 2], 8), client)
    engine.drain_inbox()
    unlucky.propose(sequence.id, [1])
    # No message from the wire has such a token; it stands for a fault in our code.
    unlucky.send(Proposal(sequence.id, 2, [[]]))
    assert unlucky.error is not None
    assert unlucky.error.reason is Reason.INTERNAL
    assert "TypeError" in caplog.text
    other.propose(sequence.id, model.greedy([1, 2], 4))
    while engine.sequences:
        engine.step()
    assert client.tokens == model.greedy([1, 2], 8)
    assert other.error is None


def test_a_request_may_name_a_drafter_that_is_away_for_new_weights() -> None:
    engine, _ = make_engine()
    drafter = ScriptedDrafter(engine, "d1", "model").handle
    drafter.draining = True
    engine.drafting.leave(drafter)
    for options in (
        SpeculationOptions(drafter_id="d1"),
        SpeculationOptions(drafter_family="model"),
    ):
        client = Client()
        engine.submit(replace(request([1, 2], 2), speculation=options), client)
        while engine.sequences:
            engine.step()
        assert len(client.tokens) == 2


@pytest.mark.parametrize("name", ["drafter_id", "drafter_family"])
def test_a_refusal_names_no_drafter_but_the_one_that_was_asked_for(name: str) -> None:
    """Any tenant may see a refusal, and drafters' names may tell about other tenants."""
    engine, _ = make_engine()
    for here in ("secret-1", "secret-2"):
        ScriptedDrafter(engine, here, here)
    engine.drafting.leave(ScriptedDrafter(engine, "secret-3", "secret-3").handle)
    asked = replace(request([1, 2], 2), speculation=SpeculationOptions(**{name: "nobody"}))
    with pytest.raises(OutriderError, match=r"no drafter .* nobody is connected") as caught:
        engine.submit(asked, Client())
    assert caught.value.reason is Reason.DRAFTER_NOT_FOUND
    assert caught.value.field == f"speculation.{name}"
    assert "secret" not in caught.value.message


def test_a_drafter_that_repeats_committed_tokens_gains_no_credit() -> None:
    """The drafter answers each verdict late, with tokens that it knows from later verdicts."""
    clock = VirtualClock()
    engine, model = make_engine(
        eos_bias=-99,
        page_count=128,
        config=EngineConfig(DraftTokensPolicy("fixed", 4)),
        clock=clock,
    )
    model.broken = lambda slices: clock.sleep(0.01)
    drafter = ScriptedDrafter(engine)
    sequence = engine.submit(request([1, 2], 200), Client())
    clock.step(engine)
    assignment = sequence.assignments["scripted"]
    before = assignment.rate.by_position[0]
    for _ in range(30):
        assignment.asked = True
        assignment.asked_at = {len(sequence.tokens): clock()}
        base = len(sequence.tokens)
        clock.step(engine)
        repeated = Proposal(sequence.id, base, sequence.tokens[base:])
        engine.drafting.on_drafts(drafter.handle, DraftBatch([repeated]))
    assert drafter.error is None
    assert assignment.rate.by_position[0] == before


def test_a_base_before_a_late_opening_breaks_the_protocol() -> None:
    """A drafter that did not pay is told of a sequence only when it is probed."""
    engine, _ = make_engine(eos_bias=-99)
    drafter = ScriptedDrafter(engine)
    unpaid = frozenset({drafter.handle})
    engine.drafting.plan = replace(engine.drafting.plan, considered=unpaid, unprobed=unpaid)
    sequence = engine.submit(request([1, 2], 20), Client())
    engine.drain_inbox()
    assert not drafter.length
    while not drafter.length:
        engine.step()
    opened = drafter.length[sequence.id]
    assert opened > 2
    drafter.send(Proposal(sequence.id, opened - 1, [1]))
    assert drafter.error is not None
    assert drafter.error.reason is Reason.PROTOCOL_VIOLATION
    assert drafter.error.field == "drafts.proposals[0].base_length"


def flooded(kind: str, sequence_id: int, length: int) -> DraftBatch:
    """Return a message with the most entries that are allowed, all of them equal."""
    if kind == "skips":
        return DraftBatch(skips=[Skip(sequence_id, length)] * MAX_BATCH_ENTRIES)
    if kind == "skips of an ended sequence":
        return DraftBatch(skips=[Skip(1, 2)] * MAX_BATCH_ENTRIES)
    return DraftBatch([Proposal(sequence_id, length, [1])] * MAX_BATCH_ENTRIES)


@pytest.mark.parametrize("drafter_count", [1, 2])
@pytest.mark.parametrize("kind", ["skips", "skips of an ended sequence", "proposals"])
def test_more_answers_than_a_drafter_was_told_messages_are_a_violation(
    kind: str, drafter_count: int
) -> None:
    engine, model = make_engine(eos_bias=-99)
    names = [f"flooding-{number}" for number in range(drafter_count)]
    drafters = [ScriptedDrafter(engine, name, name) for name in names]
    engine.submit(request([1, 2], 1), Client())
    while engine.sequences:
        engine.step()
    client = Client()
    sequence = engine.submit(request([1, 2], 8), client)
    engine.drain_inbox()
    for drafter in drafters:
        batch = flooded(kind, sequence.id, drafter.length[sequence.id])
        engine.drafting.on_drafts(drafter.handle, batch)
        engine.drain_inbox()
        assert drafter.error is not None
        assert drafter.error.reason is Reason.PROTOCOL_VIOLATION
        assert drafter.error.field == f"drafts.{kind.split()[0]}"
    while engine.sequences:
        engine.step()
    assert client.tokens == model.greedy([1, 2], 8)


def test_a_drafter_that_answers_twice_breaks_the_protocol_and_soon() -> None:
    engine, _ = make_engine(eos_bias=-99, page_count=128)
    drafter = ScriptedDrafter(engine)
    sequence = engine.submit(request([1, 2], 100), Client())
    engine.drain_inbox()
    while drafter.error is None and len(sequence.tokens) < 10:
        for _ in range(2):
            drafter.skip(sequence.id)
        engine.step()
    assert drafter.error is not None
    assert drafter.error.field == "drafts.skips"


def test_a_drafter_that_fills_its_window_token_by_token_and_skips_once_breaks_nothing() -> None:
    engine, model = make_engine(eos_bias=-99, page_count=64, always_draft=True)
    drafter = ScriptedDrafter(engine)
    client = Client()
    sequence = engine.submit(request([1, 2], 60), client)
    engine.drain_inbox()
    while engine.sequences:
        room = drafter.handle.hello.max_draft_tokens - len(drafter.ahead[sequence.id])
        for _ in range(room):
            drafter.propose(sequence.id, [1])
        drafter.skip(sequence.id)
        engine.step()
    assert drafter.error is None
    assert client.tokens == model.greedy([1, 2], 60)


def test_answers_that_a_drafter_saves_up_are_bounded() -> None:
    engine, _ = make_engine()
    drafter = ScriptedDrafter(engine).handle
    for _ in range(MOST_ANSWERS):
        drafter.may_answer(16)
    assert drafter.skips_left == drafter.proposals_left == MOST_ANSWERS


def test_a_message_of_many_entries_fills_the_budget_of_an_untaken_stream() -> None:
    batch = DraftBatch(skips=[Skip(1, 2)] * MAX_BATCH_ENTRIES)
    assert held_bytes(24_576, batch) > drafter_streams._MAX_UNTAKEN_BYTES
