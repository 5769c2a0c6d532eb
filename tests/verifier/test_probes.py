"""A drafter that does not pay gets only probes, which cost the target no time."""

from itertools import pairwise

import pytest

from outrider.protocol.draft_messages import DraftBatch, Proposal
from outrider.protocol.draft_tokens_policy import DraftTokensPolicy
from outrider.protocol.messages import TokenRequest
from tests.verifier.fake_model import GREEDY, Client, ScriptedDrafter, make_engine
from tests.virtual_time import VirtualClock
from verifier_svc.engine.config import EngineConfig
from verifier_svc.engine.loop import Engine
from verifier_svc.state.sequence import Sequence

POLICIES = [DraftTokensPolicy(), DraftTokensPolicy.parse("auto"), DraftTokensPolicy("fixed", 4)]


def doubted(
    policy: DraftTokensPolicy, **limits: int
) -> tuple[Engine, ScriptedDrafter, Sequence, VirtualClock]:
    """Return an engine, a drafter that was always wrong, its new sequence, and the clock.

    A forward takes 52 ms.
    """
    clock = VirtualClock()
    engine, model = make_engine(
        eos_bias=-99, page_count=256, config=EngineConfig(policy, **limits), clock=clock
    )
    model.broken = lambda slices: clock.sleep(0.052)
    drafter = ScriptedDrafter(engine)
    drafter.prove()
    for tokens, seconds in ((0, 0.052), (4, 0.057), (8, 0.065)):
        engine.cost.calibrate(1, 1 + tokens, seconds)
    drafter.handle.round_trip.observe(0.020)
    first = engine.submit(TokenRequest([1, 2], 400, GREEDY), Client())
    clock.step(engine)
    for _ in range(100):
        first.assignments["scripted"].observe_acceptance(8, 0)
    clock.step(engine)
    engine.cancel(first)
    sequence = engine.submit(TokenRequest(list(range(1, 7)), 400, GREEDY), Client())
    engine.drain_inbox()
    return engine, drafter, sequence, clock


def verdict_count(drafter: ScriptedDrafter) -> int:
    return sum([len(batch.verdicts) for batch in drafter.received])


def steps_with_verdicts(
    engine: Engine, drafter: ScriptedDrafter, clock: VirtualClock, steps: int
) -> list[int]:
    """Take some steps; return the numbers of the steps after which the drafter got a verdict."""
    found: list[int] = []
    for i in range(steps):
        before = verdict_count(drafter)
        clock.step(engine)
        if verdict_count(drafter) > before:
            found.append(i)
    return found


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_a_bad_drafter_begins_a_new_sequence_with_a_probe(
    policy: DraftTokensPolicy,
) -> None:
    _, drafter, sequence, _ = doubted(policy)
    assert not sequence.assignments["scripted"].asked
    opened = drafter.received[-1].opened[0]
    assert (opened.draft_tokens, opened.window.depth) == (1, 1)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_a_probe_is_neither_verified_nor_waited_for(policy: DraftTokensPolicy) -> None:
    engine, drafter, sequence, clock = doubted(policy, max_batch_tokens=4)
    drafter.propose(sequence.id, [1])
    began = clock()
    for _ in range(40):
        clock.step(engine)
    assert sequence.stats.draft_token_count == 0
    assert clock() - began == pytest.approx(40 * 0.052)


def test_probes_without_an_answer_become_rarer() -> None:
    engine, drafter, _, clock = doubted(DraftTokensPolicy())
    steps = steps_with_verdicts(engine, drafter, clock, 300)
    gaps = [after - before for before, after in pairwise(steps)]
    assert gaps == sorted(gaps)
    assert len(steps) <= 7


def test_a_probe_asks_for_one_token_and_brings_all_missed_tokens() -> None:
    engine, drafter, sequence, clock = doubted(DraftTokensPolicy())
    steps_with_verdicts(engine, drafter, clock, 40)
    verdicts = [
        verdict
        for batch in drafter.received
        for verdict in batch.verdicts
        if verdict.sequence_id == sequence.id
    ]
    assert verdicts
    assert all(verdict.draft_tokens == 1 for verdict in verdicts)
    sent = [token for verdict in verdicts for token in verdict.new_token_ids]
    assert sent == sequence.tokens[6 : 6 + len(sent)]


@pytest.mark.parametrize("right", [True, False])
def test_a_late_answer_to_a_probe_counts(right: bool) -> None:
    engine, drafter, sequence, clock = doubted(DraftTokensPolicy())
    clock.step(engine)
    assignment = sequence.assignments["scripted"]
    drafter.propose(sequence.id, [0], anew=True)
    steps_with_verdicts(engine, drafter, clock, 20)
    base = assignment.sent_length
    for _ in range(3):
        clock.step(engine)
    assert assignment.sent_length == base
    before = assignment.rate.by_position[0]
    token = sequence.tokens[base]
    if not right:
        token = (token + 1) % 7
    engine.drafting.on_drafts(drafter.handle, DraftBatch([Proposal(sequence.id, base, [token])]))
    assert drafter.error is None
    assert (assignment.rate.by_position[0] > before) is right
