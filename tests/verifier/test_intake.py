"""Intake: drafters get a sequence when it leaves the queue, and prompts keep their share."""

from functools import partial

from outrider.protocol.draft_tokens_policy import DraftTokensPolicy
from outrider.protocol.messages import SpeculationOptions, TokenRequest
from tests.verifier.fake_model import GREEDY, Client, ScriptedDrafter, make_engine
from verifier_svc.engine.config import EngineConfig
from verifier_svc.engine.intake import Inbox


def opened_ids(drafter: ScriptedDrafter) -> list[int]:
    """Return the ids of the sequences opened for a drafter, in order."""
    return [opened.sequence_id for step in drafter.received for opened in step.opened]


def test_a_sequence_is_opened_for_drafters_when_it_leaves_the_queue() -> None:
    engine, _ = make_engine(eos_bias=-99, config=EngineConfig(max_sequences=1))
    early = ScriptedDrafter(engine, "early", "early")
    first, second = (engine.submit(TokenRequest([1, 2], 3, GREEDY), Client()) for _ in range(2))
    late = ScriptedDrafter(engine, "late", "late")
    engine.drain_inbox()
    assert opened_ids(early) == opened_ids(late) == [first.id]
    while first.id in engine.sequences:
        engine.step()
    engine.step()
    assert opened_ids(early) == opened_ids(late) == [first.id, second.id]


def test_a_drafter_that_joins_late_gets_preempted_sequences_too() -> None:
    engine, _ = make_engine(page_count=6, page_size=2, eos_bias=-99)
    for _ in range(2):
        engine.submit(TokenRequest([1, 2], 9, GREEDY), Client())
    while not engine.scheduler.waiting:
        engine.step()
    drafter = ScriptedDrafter(engine)
    engine.drain_inbox()
    assert set(opened_ids(drafter)) == set(engine.sequences)


def test_deep_drafts_leave_room_for_a_prompt() -> None:
    config = EngineConfig(DraftTokensPolicy("fixed", 8), max_batch_tokens=32)
    engine, model = make_engine(page_count=256, eos_bias=-99, config=config)
    drafter = ScriptedDrafter(engine)
    deep = SpeculationOptions(draft_tokens=8)
    decoding = [
        engine.submit(TokenRequest([i % 4, 2], 200, GREEDY, speculation=deep), Client())
        for i in range(6)
    ]
    engine.drain_inbox()
    engine.step()
    prompt = engine.submit(TokenRequest([1] * 40, 3, GREEDY), Client())
    for sequence in decoding:
        drafter.propose(sequence.id, model.greedy(sequence.tokens, 8), anew=True)
    engine.step()
    # The prompt gets a quarter of the step, each sequence gets a token, and drafts fill the rest.
    assert prompt.num_uncomputed_tokens == 40 - 8
    assert sum(sequence.stats.draft_token_count for sequence in decoding) == 32 - 6 - 8


def test_work_that_is_posted_meanwhile_does_not_delay_the_next_step() -> None:
    """A drafter may post messages as fast as the engine can process them."""
    inbox = Inbox()
    done: list[str] = []

    def flood() -> None:
        done.append("message")
        assert len(done) < 100
        inbox.post(flood)

    inbox.post(flood)
    inbox.post(partial(done.append, "request"))
    inbox.run_all()
    assert done == ["message", "request"]
    inbox.run_all()
    assert done == ["message", "request", "message"]
