"""The engine waits for a draft as long as that pays. All tests run in virtual time."""

from functools import partial

import pytest

from outrider.errors import OutriderError
from outrider.protocol.draft_messages import DraftBatch, Proposal, StepBatch, Window
from outrider.protocol.draft_tokens_policy import DraftTokensPolicy
from outrider.protocol.messages import TokenChunk, TokenRequest
from tests.verifier.fake_model import (
    GREEDY,
    Client,
    ScriptedDrafter,
    TableModel,
    make_engine,
    make_plan,
)
from tests.virtual_time import VirtualClock
from verifier_svc.engine.config import EngineConfig
from verifier_svc.engine.loop import Engine
from verifier_svc.engine.outbox import Delivery
from verifier_svc.policy.goodput import goodput
from verifier_svc.state.acceptance_rate import AcceptanceRate
from verifier_svc.state.sequence import Assignment, Sequence


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


class TimedClient(Client):
    """A client that records when each token came."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock = clock
        self.arrived_s: list[float] = []

    def __call__(self, message: TokenChunk | OutriderError) -> None:
        super().__call__(message)
        self.arrived_s += [self._clock()] * (len(self.tokens) - len(self.arrived_s))


def slow_forward(model: TableModel, clock: VirtualClock, seconds: float) -> None:
    """Make each forward take `seconds`."""
    model.broken = lambda slices: clock.sleep(seconds)


def after_one_step(
    clock: VirtualClock, max_tokens: int, forward_s: float, **hello: object
) -> tuple[Engine, TableModel, ScriptedDrafter, Sequence]:
    """Return an engine, its model, a drafter and a greedy sequence, after one step.

    The step took `forward_s` and committed a drafted token.
    """
    engine, model = make_engine(eos_bias=-99, clock=clock)
    drafter = ScriptedDrafter(engine, **hello)
    sequence = engine.submit(TokenRequest([1], max_tokens, GREEDY), Client())
    slow_forward(model, clock, forward_s)
    engine.drain_inbox()
    drafter.propose(sequence.id, model.greedy([1], 1))
    engine.step()
    return engine, model, drafter, sequence


def worth_waiting_for(engine: Engine) -> tuple[tuple[Assignment, ...], float]:
    """Make a plan; return the drafts that it waits for, and its longest wait in seconds."""
    plan = make_plan(engine)
    return tuple([assignment for _, assignment in plan.wait_for]), plan.wait_s


def test_goodput_is_the_faster_of_waiting_and_going_on() -> None:
    def rate(wait_s: float, busy_s: float = 0.0) -> float:
        return goodput(3.0, 0.12, wait_s, busy_s, (1.0, 0.1), prob_all_accepted=0.8)[0]

    assert rate(0.0) == pytest.approx(3 / 0.12)
    assert rate(0.001) == pytest.approx(3 / 0.121)
    # One plain step hides the time of a draft.
    assert rate(0.09) == rate(0.1) == pytest.approx((0.8 * 3 + 1) / (0.8 * 0.12 + 0.1))
    # A drafter on the target's cores hides nothing.
    assert rate(0.09, busy_s=0.09) == pytest.approx(3 / 0.21)
    # After a plain step, the engine waits if a draft is nearly done; else it takes another plain
    # step.
    assert rate(0.13) == pytest.approx((0.8 * 3 + 1) / (0.8 * 0.12 + 0.13))
    assert rate(0.17) == pytest.approx((0.8 * 3 + 2) / (0.8 * 0.12 + 0.2))
    assert rate(60.0) > 1 / 0.1, "goodput is at least that of plain decoding"


def test_a_drafter_that_skips_is_not_waited_for(clock: VirtualClock) -> None:
    engine, _, drafter, sequence = after_one_step(clock, 10, 0.05)
    drafter.handle.round_trip.observe(0.01)
    make_plan(engine, 3)
    late, budget_s = worth_waiting_for(engine)
    assert late
    assert budget_s > 0.02
    drafter.skip(sequence.id)
    assert not worth_waiting_for(engine)[0]


def test_a_draft_with_all_tokens_that_it_may_have_is_not_waited_for(clock: VirtualClock) -> None:
    engine, model, drafter, sequence = after_one_step(clock, 20, 0.05)
    drafter.handle.round_trip.observe(0.01)
    [assignment] = sequence.assignments.values()
    # A drafter on the target's cores gets a window like this: only the token that was asked for.
    assignment.window = Window(1, 1)
    assert make_plan(engine, 3).draft_tokens[sequence.id] > 1
    assert worth_waiting_for(engine)[0]
    drafter.propose(sequence.id, model.greedy(sequence.tokens, 1))
    assert len(assignment.trie.main_path) == 1
    assert not worth_waiting_for(engine)[0]


def test_a_draft_takes_the_time_of_the_tokens_that_it_should_have(clock: VirtualClock) -> None:
    engine, _, drafter, sequence = after_one_step(clock, 40, 0.05)
    drafter.handle.round_trip.observe(0.001)
    drafter.handle.token_time.observe(0.01)
    [assignment] = sequence.assignments.values()
    make_plan(engine, 3)
    wanted = make_plan(engine).asks[assignment]
    asked = assignment.draft_tokens
    assert assignment.due_s(assignment.told_at) == pytest.approx(0.001 + 0.01 * asked)
    for _ in range(400):
        assignment.observe_length(asked, 1, 1)
    assert assignment.due_s(assignment.told_at) == pytest.approx(0.011, rel=0.1)
    # A long draft would take several steps, so the engine asks for a short draft and waits for it.
    assert make_plan(engine).asks[assignment] < wanted


def test_a_draft_that_takes_too_long_is_used_without_a_wait(
    clock: VirtualClock,
) -> None:
    engine, model, drafter, sequence = after_one_step(clock, 20, 0.02)
    truth = model.greedy([1], 20)
    assert sequence.tokens == [1, *truth[:2]]
    drafter.handle.round_trip.observe(0.03)
    make_plan(engine, 3)
    assert not worth_waiting_for(engine)[0]
    asked = drafter.length[sequence.id]
    engine.step()
    assert sequence.tokens == [1, *truth[:3]]
    assert drafter.length[sequence.id] == asked + 1
    # The drafter sent this before it knew the third token.
    proposal = Proposal(sequence.id, asked, truth[2:7])
    engine.drafting.on_drafts(drafter.handle, DraftBatch([proposal]))
    engine.step()
    assert sequence.tokens == [1, *truth[:8]]


def test_a_draft_of_little_worth_does_not_hold_up_the_batch(clock: VirtualClock) -> None:
    engine, _ = make_engine(eos_bias=-99, config=EngineConfig(DraftTokensPolicy()), clock=clock)
    engine.cost.calibrate(2, 2, 0.05)
    engine.cost.calibrate(2, 10, 0.055)
    drafter = ScriptedDrafter(engine)
    good, poor = (engine.submit(TokenRequest([1, 2], 40, GREEDY), Client()) for _ in range(2))
    engine.drain_inbox()
    engine.step()
    for sequence, accepted in ((good, 4), (poor, 0)):
        for turn in range(40):
            sequence.assignments["scripted"].rate.observe(4, accepted or turn % 3 == 0)
    for _ in range(7):
        drafter.handle.round_trip.observe(0.012)

    def waited_for(*ready: Sequence) -> list[Sequence]:
        for sequence in ready:
            drafter.propose(sequence.id, [1] * 4)
        make_plan(engine, 4)
        for sequence in (good, poor):
            assignment = sequence.assignments["scripted"]
            assignment.answered_length = 1
            assignment.asked_at = {}
            assignment.told_at = clock()
        worth, budget_s = worth_waiting_for(engine)
        assert budget_s <= 0.05
        return [sequence for sequence in (good, poor) if sequence.assignments["scripted"] in worth]

    assert good in waited_for()
    assert waited_for(good) == []


def test_with_always_draft_a_missing_first_draft_costs_a_second_a_step(
    clock: VirtualClock,
) -> None:
    """The missing draft does not change the drafter's measured round trip."""
    engine, model = make_engine(eos_bias=-99, always_draft=True, clock=clock)
    drafter = ScriptedDrafter(engine)
    client = TimedClient(clock)
    engine.submit(TokenRequest([1, 2], 4, GREEDY), client)
    slow_forward(model, clock, 0.05)
    began_s = clock()
    clock.finish(engine)
    arrived_s = [at - began_s for at in client.arrived_s]
    assert arrived_s == pytest.approx([0.055, 1.105, 2.15, 2.2], abs=0.01)
    assert drafter.handle.round_trip.value == 0.0


@pytest.mark.parametrize("quick_rate", [0.3, 0.99])
def test_with_always_draft_a_step_has_the_drafts_of_all_its_drafters(
    clock: VirtualClock, quick_rate: float
) -> None:
    """The quick drafter offers one token, long before the slow drafter offers four tokens."""
    config = EngineConfig(DraftTokensPolicy("fixed", 4), draft_trees=True)
    engine, model = make_engine(eos_bias=-99, config=config, always_draft=True, clock=clock)
    slow_forward(model, clock, 0.01)
    quick, slow = (ScriptedDrafter(engine, name, name) for name in ("quick", "slow"))
    truth = model.greedy([1, 2], 24)
    deliver = engine.outbox._deliver

    def answer(drafter: ScriptedDrafter, count: int) -> None:
        done = len(sequence.tokens) - 2
        if sequence.id in engine.sequences:
            drafter.propose(sequence.id, truth[done : done + count], anew=True)
            drafter.skip(sequence.id)

    def answer_later(deliveries: list[Delivery]) -> None:
        deliver(deliveries)
        for sink, message in deliveries:
            if isinstance(message, StepBatch):
                mine, seconds, count = (
                    (quick, 0.001, 1) if sink == quick.handle.sink else (slow, 0.03, 4)
                )
                clock.after(seconds, partial(engine.post, partial(answer, mine, count)))

    engine.outbox._deliver = answer_later
    client = Client()
    sequence = engine.submit(TokenRequest([1, 2], 24, GREEDY), client)
    sequence.assignments["quick"].rate = AcceptanceRate(quick_rate, 4)
    clock.finish(engine)
    assert client.tokens == truth
    assert client.chunks[-1].stats is not None
    # A step of the prompt, and then five tokens a step.
    assert client.chunks[-1].stats.forward_count <= 6


def test_a_drafter_that_falls_silent_stops_being_waited_for(clock: VirtualClock) -> None:
    engine, model = make_engine(eos_bias=-99, clock=clock)
    slow_forward(model, clock, 0.01)
    drafter = ScriptedDrafter(engine)
    client = TimedClient(clock)
    sequence = engine.submit(TokenRequest([1, 2], 150, GREEDY), client)
    engine.drain_inbox()
    drafter.propose(sequence.id, model.greedy([1, 2], 4))
    assert sequence.assignments["scripted"].answered_length == 2
    clock.finish(engine)
    assert client.arrived_s[149] - client.arrived_s[99] == pytest.approx(50 * 0.01)


def test_a_prompt_answer_is_waited_for_and_used(clock: VirtualClock) -> None:
    engine, model = make_engine(eos_bias=-99, clock=clock)
    slow_forward(model, clock, 0.02)
    drafter = ScriptedDrafter(engine)
    client = TimedClient(clock)
    truth = model.greedy([1, 2], 60)
    deliver = engine.outbox._deliver

    def answer_soon(deliveries: list[Delivery]) -> None:
        deliver(deliveries)

        def answer() -> None:
            done = len(sequence.tokens) - 2
            if sequence.id in engine.sequences and done < 55:
                drafter.propose(sequence.id, truth[done : done + 4], anew=True)

        if any(isinstance(argument, StepBatch) for _, argument in deliveries):
            clock.after(0.004, lambda: engine.post(answer))

    engine.outbox._deliver = answer_soon
    sequence = engine.submit(TokenRequest([1, 2], 60, GREEDY), client)
    clock.finish(engine)
    assert client.tokens == truth
    assert client.chunks[-1].stats is not None
    assert client.chunks[-1].stats.forward_count < 25
