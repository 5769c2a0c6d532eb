"""Who waits in the queue, who is in drafters' hands, and what is kept for those who begin."""

from fake_model import Client, ScriptedDrafter, make_engine

from outrider.draft_tokens_policy import DraftTokensPolicy
from outrider.messages import SamplingParams, SpeculationOptions, TokenRequest
from verifier_svc.engine.target import Limits

GREEDY = SamplingParams(0.0)


def told_of(drafter: ScriptedDrafter) -> list[int]:
    return [opened.sequence_id for step in drafter.told for opened in step.opened]


def test_drafters_hear_of_a_sequence_when_it_leaves_the_queue_and_not_before() -> None:
    engine, _ = make_engine(eos_bias=-99, limits=Limits(max_sequences=1))
    early = ScriptedDrafter(engine, "early", "early")
    first, second = (engine.submit(TokenRequest([1, 2], 3, GREEDY), Client()) for _ in range(2))
    late = ScriptedDrafter(engine, "late", "late")
    engine.drain_inbox()
    assert told_of(early) == told_of(late) == [first.id]
    while first.id in engine.sequences:
        engine.step()
    engine.step()
    assert told_of(early) == told_of(late) == [first.id, second.id]


def test_a_preempted_sequence_is_handed_to_a_drafter_that_joins_while_it_waits() -> None:
    engine, _ = make_engine(page_count=6, page_size=2, eos_bias=-99)
    for _ in range(2):
        engine.submit(TokenRequest([1, 2], 9, GREEDY), Client())
    while not engine.scheduler.waiting:
        engine.step()
    drafter = ScriptedDrafter(engine)
    engine.drain_inbox()
    assert set(told_of(drafter)) == set(engine.sequences)


def test_deep_drafts_leave_room_for_a_prompt() -> None:
    limits = Limits(DraftTokensPolicy("fixed", 8), max_batch_tokens=32)
    engine, model = make_engine(page_count=256, eos_bias=-99, limits=limits)
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
    # A quarter of a step is the prompt's, and with a token each of six sequences, drafts had all the rest.
    assert prompt.num_uncomputed_tokens == 40 - 8
    assert sum(sequence.stats.draft_token_count for sequence in decoding) == 32 - 6 - 8
