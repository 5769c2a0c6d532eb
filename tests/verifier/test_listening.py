"""A drafter whose guesses cost next to nothing is asked even if nobody waits for its drafts."""

import pytest

from outrider.protocol.draft_messages import DraftBatch, Proposal
from outrider.protocol.draft_tokens_policy import DraftTokensPolicy
from outrider.protocol.messages import TokenRequest
from tests.verifier.fake_model import GREEDY, Client, ScriptedDrafter, make_engine, make_plan
from verifier_svc.engine.config import EngineConfig
from verifier_svc.engine.loop import Engine
from verifier_svc.policy.plan import Plan
from verifier_svc.state.sequence import Assignment

STEP_S = 0.010


def rarely_right(
    token_s: float = 0.0001, row: float = 0.2, most: int = 16
) -> tuple[Engine, Assignment]:
    """Return an engine whose drafter answers in an eighth of a step, and is right one time in ten.

    After eight right guesses all guesses are right. The drafter's drafts have at most `most`
    tokens; each token makes a step longer by the share `row` of a plain step.
    """
    engine, _ = make_engine(eos_bias=-99, page_count=256, config=EngineConfig(DraftTokensPolicy()))
    drafter = ScriptedDrafter(engine, max_draft_tokens=most)
    drafter.prove()
    drafter.handle.round_trip.observe(STEP_S / 8)
    drafter.handle.token_time.observe(token_s)
    sequence = engine.submit(TokenRequest([1, 2], 400, GREEDY), Client())
    engine.step()
    # The step above changed the costs by its real time, so they are set again.
    for drafted in (0, 1, 8):
        engine.cost.calibrate(1, 1 + drafted, STEP_S * (1 + row * drafted))
    assignment = sequence.assignments["scripted"]
    for turn in range(100):
        observe(assignment, run=0, accepted=int(turn % 10 == 0))
        observe(assignment, run=8, accepted=8)
    assignment.set_run(0)
    return engine, assignment


def observe(assignment: Assignment, run: int, accepted: int) -> None:
    """Count a draft of 8 tokens after a run of right guesses."""
    assignment.set_run(run)
    assignment.observe_acceptance(8, accepted)


def test_the_rate_after_a_right_guess_is_not_that_after_a_wrong_one() -> None:
    _, assignment = rarely_right()
    rare = assignment.rate.by_position[0]
    assignment.follow(3, 3, STEP_S, skipped=False)
    after_three = assignment.rate
    assignment.follow(3, 3, STEP_S, skipped=False)
    assert assignment.run == 6
    assert assignment.rate.by_position[0] > 0.9 > 0.2 > rare
    assert assignment.rate is not after_three
    for guessed, right, skipped in ((2, 1, False), (0, 0, True)):
        assignment.set_run(6)
        assignment.follow(guessed, right, STEP_S, skipped=skipped)
        assert assignment.rate.by_position[0] == rare


def test_a_run_goes_on_where_no_guess_has_come_yet() -> None:
    _, assignment = rarely_right()
    assignment.set_run(6)
    assignment.follow(0, 0, STEP_S, skipped=False)
    assert assignment.run == 6


def test_a_drafter_that_takes_time_has_no_run() -> None:
    _, assignment = rarely_right(token_s=0.2 * STEP_S)
    assignment.follow(3, 3, STEP_S, skipped=False)
    assert assignment.run == 0


@pytest.mark.parametrize(("run", "waits"), [(0, False), (8, True)])
def test_a_step_waits_for_a_draft_only_within_a_run(run: int, waits: bool) -> None:
    engine, assignment = rarely_right()
    make_plan(engine)
    assignment.set_run(run)
    assignment.asked = True
    assignment.answered_length = 1
    plan = make_plan(engine)
    assert plan.asks[assignment] == 8 + (not waits)
    assert bool(plan.wait_for) is waits
    assert assignment not in plan.probes


def test_a_drafter_that_takes_time_or_the_targets_device_is_only_probed() -> None:
    engine, assignment = rarely_right(token_s=0.2 * STEP_S)
    assert assignment not in make_plan(engine, 3).asks
    engine, assignment = rarely_right()
    assignment.drafter.is_local = True
    assert assignment not in make_plan(engine, 3).asks


def test_a_draft_that_nobody_waits_for_is_verified_as_far_as_it_pays() -> None:
    engine, assignment = rarely_right()
    plan = make_plan(engine)
    assert plan.draft_tokens.get(assignment_sequence(engine), 0) == 0
    assignment.set_run(8)
    assert make_plan(engine).draft_tokens[assignment_sequence(engine)] == 8


@pytest.mark.parametrize(("row", "is_heard"), [(0.2, True), (0.9, False)])
def test_it_is_not_heard_where_even_a_right_draft_costs_too_much(
    row: float, is_heard: bool
) -> None:
    engine, assignment = rarely_right(row=row)
    assert (assignment in make_plan(engine, 3).asks) is is_heard


@pytest.mark.parametrize(("row", "tokens"), [(0.2, 1), (0.4, 0)])
def test_a_draft_that_nobody_waits_for_must_gain_clearly_more_than_its_rows_cost(
    row: float, tokens: int
) -> None:
    engine, assignment = rarely_right(row=row, most=1)
    for turn in range(100):
        observe(assignment, run=2, accepted=turn % 2)
    assignment.answer_rate = 0.0
    assert 0.4 < assignment.rate.by_position[0] < 0.6
    [sequence] = engine.sequences.values()
    proposal = Proposal(sequence.id, len(sequence.tokens), [1])
    engine.drafting.on_drafts(assignment.drafter, DraftBatch([proposal]))
    plan = make_plan(engine)
    assert assignment in plan.asks
    assert plan.draft_tokens.get(sequence.id, 0) == tokens


def plan_of(engine: Engine, step: int) -> Plan:
    """Return the plan of the step with this number."""
    running = engine.scheduler.running.values()
    return engine.planner.plan(running, engine.drafting.plan, step, engine.clock())


def assignment_sequence(engine: Engine) -> int:
    [sequence_id] = engine.sequences
    return sequence_id


def test_after_many_steps_in_vain_it_is_asked_less_often() -> None:
    engine, assignment = rarely_right()
    asked: list[int] = []
    for idle_steps in (0, 16, 32, 48, 480):
        assignment.idle_steps = idle_steps
        asked.append(sum(assignment in plan_of(engine, step).asks for step in range(16)))
    assert asked == [16, 8, 4, 2, 2]
