"""A drafter that does not pay is paused, and probed at a bounded price, so that it comes back once it got better."""

import pytest
from fake_model import Client, ScriptedDrafter, make_engine
from virtual_time import VirtualClock

from outrider.depth_policy import DepthPolicy
from outrider.messages import SamplingParams, SpeculationOptions, TokenRequest
from verifier_svc.engine import Engine
from verifier_svc.sequence import Sequence
from verifier_svc.target import Limits

GREEDY = SamplingParams(temperature=0.0)


def doubted(policy: DepthPolicy, clock: VirtualClock | None = None, **limits: int) -> tuple[Engine, ScriptedDrafter, Sequence]:
    """A drafter that was always wrong, and a new sequence that it is handed; a forward takes 52 ms."""
    virtual = clock or VirtualClock()
    engine, model = make_engine(eos_bias=-99, limits=Limits(policy, **limits), clock=virtual)
    model.broken = lambda slices: virtual.sleep(0.052)
    drafter = ScriptedDrafter(engine)
    for depth, seconds in ((0, 0.052), (4, 0.057), (8, 0.065)):
        engine.cost.calibrate(1, 1 + depth, seconds)
    first = engine.submit(TokenRequest([1, 2], 40, GREEDY), Client())
    for _ in range(100):
        engine.drafting.judge(first.assignments["scripted"], 8, 0)
    engine.cancel(first)
    sequence = engine.submit(TokenRequest(list(range(1, 7)), 40, GREEDY), Client())
    engine.drain_inbox()
    return engine, drafter, sequence


def test_a_drafter_that_is_always_wrong_is_not_asked_on_a_new_sequence_but_for_probes() -> None:
    _, _, sequence = doubted(DepthPolicy())
    assert sequence.assignments["scripted"].pause.steps_left > 0


POLICIES = [DepthPolicy(), DepthPolicy.parse("auto"), DepthPolicy("fixed", 4)]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_what_a_doubted_drafter_sends_for_a_prompt_is_not_verified_with_it(policy: DepthPolicy) -> None:
    engine, drafter, sequence = doubted(policy, max_batch_tokens=4)
    drafter.propose(sequence.id, [1])
    for _ in range(2):
        engine.planner.plan(engine.scheduler.running.values())
        engine.step()
    assert sequence.stats.forward_count == 1
    assert sequence.stats.draft_token_count == 0


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_a_probe_asks_for_one_token_whatever_the_policy(policy: DepthPolicy) -> None:
    engine, drafter, sequence = doubted(policy)
    assignment = sequence.assignments["scripted"]
    for _ in range(200):
        engine.planner.waited(0.0, 0.052, [])
    for _ in range(30):
        if not assignment.pause.probing:
            engine.planner.plan(engine.scheduler.running.values())
            engine.step()
    assert assignment.pause.probing
    engine.planner.plan([sequence])
    assert sequence.depth == 1
    verdict = drafter.told[-1].verdicts[0]
    assert assignment.draft_tokens == 1
    assert verdict.draft_tokens == 1


def test_time_spent_on_probes_is_bounded() -> None:
    engine, _ = make_engine()
    engine.cost.calibrate(1, 1, 0.01)
    planner = engine.planner
    for _ in range(1000):
        planner.waited(0.0, 0.01, [])
    assert planner._probe_credit_s == pytest.approx(0.02)
    assert planner.worth_waiting_for([], 0.0) == ([], 0.0)


def test_plain_traffic_saves_nothing_for_probes() -> None:
    clock = VirtualClock()
    engine, _, sequence = doubted(DepthPolicy(), clock)
    engine.cancel(sequence)
    engine.submit(TokenRequest([1, 2], 60, GREEDY, speculation=SpeculationOptions(enabled=False)), Client())
    for _ in range(30):
        clock.step(engine)
    assert engine.planner._probe_credit_s == 0.0
    engine.submit(TokenRequest([1, 2], 60, GREEDY), Client())
    for _ in range(5):
        clock.step(engine)
    assert engine.planner._probe_credit_s > 0.0


def test_probes_of_many_sequences_take_no_more_than_their_share_of_the_time() -> None:
    engine, _ = make_engine(limits=Limits(DepthPolicy(), max_sequences=64), page_count=512)
    for tokens in (1, 5):
        engine.cost.calibrate(1, tokens, 0.01 + 0.001 * tokens)
        engine.cost.calibrate(32, 32 * tokens, 0.01 + 0.001 * 32 * tokens)
    drafter, planner = ScriptedDrafter(engine), engine.planner
    sequences = [engine.submit(TokenRequest([1, 2], 40, GREEDY), Client()) for _ in range(32)]
    engine.drain_inbox()
    engine.step()
    planner.plan(sequences)
    assignments = [sequence.assignments[drafter.handle.id] for sequence in sequences]
    step_s = engine.cost.estimate(32, 32)
    token_s, asked = (engine.cost.estimate(32, 160) - step_s) / 128, 0
    for _ in range(1000):
        planner.plan(sequences)
        planner.waited(0.0, step_s, [])
        asked += sum(planner.affords_probe(assignment) for assignment in assignments)
    assert 0.9 < asked * token_s / (0.01 * 1000 * step_s) <= 1.0


def test_probes_of_many_sequences_are_asked_for_together() -> None:
    engine, _ = make_engine(limits=Limits(DepthPolicy(), max_sequences=64), page_count=512)
    for tokens in (1, 5):
        engine.cost.calibrate(32, 32 * tokens, 0.01 + 0.001 * 32 * tokens)
    drafter, planner = ScriptedDrafter(engine), engine.planner
    sequences = [engine.submit(TokenRequest([1, 2], 40, GREEDY), Client()) for _ in range(32)]
    engine.drain_inbox()
    engine.step()
    asked = []
    for _ in range(300):
        planner.plan(sequences)
        planner.waited(0.0, 0.042, [])
        asked.append(sum(planner.affords_probe(sequence.assignments[drafter.handle.id]) for sequence in sequences))
    assert set(asked) == {0, 32}


def test_the_wait_for_a_slow_drafters_probe_is_saved_for_whoever_else_is_probed() -> None:
    engine, _ = make_engine(limits=Limits(DepthPolicy()))
    engine.cost.calibrate(1, 1, 0.05)
    engine.cost.calibrate(1, 5, 0.054)
    quick, slow = ScriptedDrafter(engine, "quick", "one"), ScriptedDrafter(engine, "slow", "other")
    planner, sequence = engine.planner, engine.submit(TokenRequest([1, 2], 40, GREEDY), Client())
    engine.drain_inbox()
    engine.step()
    quick.handle.round_trip.observe(0.001)
    slow.handle.round_trip.observe(0.03)
    for _ in range(40):
        planner.plan([sequence])
        planner.waited(0.0, 0.05, [])
        if planner.affords_probe(sequence.assignments["quick"]):
            break
    assert planner._probing
    assert not planner.affords_probe(sequence.assignments["slow"])


def test_a_probe_is_not_asked_for_before_its_answer_can_be_waited_for() -> None:
    engine, _ = make_engine(limits=Limits(DepthPolicy()))
    engine.cost.calibrate(1, 1, 0.05)
    drafter, planner = ScriptedDrafter(engine), engine.planner
    sequence = engine.submit(TokenRequest([1, 2], 40, GREEDY), Client())
    engine.drain_inbox()
    drafter.handle.round_trip.observe(0.02)
    assignment, steps = sequence.assignments[drafter.handle.id], 0
    while not planner.affords_probe(assignment):
        planner.waited(0.0, 0.05, [])
        steps += 1
    assert 0.9 <= steps * 0.01 * 0.05 / 0.02 <= 1.2


def test_a_drafter_slower_than_can_be_saved_for_is_probed_once_the_savings_are_full() -> None:
    engine, _ = make_engine(limits=Limits(DepthPolicy()))
    engine.cost.calibrate(1, 1, 0.0531)
    engine.cost.calibrate(1, 5, 0.0571)
    drafter, planner = ScriptedDrafter(engine), engine.planner
    sequence = engine.submit(TokenRequest([1, 2], 40, GREEDY), Client())
    engine.drain_inbox()
    engine.step()
    planner.plan([sequence])
    drafter.handle.round_trip.observe(10.0)
    for _ in range(1000):
        planner.waited(0.0, 0.0531, [])
    assert planner.affords_probe(sequence.assignments[drafter.handle.id])
