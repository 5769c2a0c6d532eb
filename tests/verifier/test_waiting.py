"""A draft is waited for as long as that pays, and no longer. All in virtual time, so a busy machine changes nothing."""

import time

import pytest
from fake_model import Client, ScriptedDrafter, TableModel, make_engine
from virtual_time import VirtualTime

from outrider.depth_policy import DepthPolicy
from outrider.errors import OutriderError
from outrider.messages import DraftBatch, Proposal, SamplingParams, StepBatch, TokenChunk, TokenRequest
from verifier_svc.depth import goodput, patience_s
from verifier_svc.engine import Engine, Limits
from verifier_svc.sequence import Sequence

GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(autouse=True)
def virtual(monkeypatch: pytest.MonkeyPatch) -> VirtualTime:
    return VirtualTime(monkeypatch)


class StopsAt(Client):
    """Ends the engine's loop with its last token."""

    def __init__(self, engine: Engine, count: int) -> None:
        super().__init__()
        self._engine, self._count = engine, count
        self.arrived_s: list[float] = []
        """When each token came."""

    def __call__(self, message: TokenChunk | OutriderError) -> None:
        super().__call__(message)
        self.arrived_s += [time.monotonic()] * (len(self.tokens) - len(self.arrived_s))
        if len(self.tokens) >= self._count:
            self._engine.stop()


def slow_forward(model: TableModel, seconds: float) -> None:
    model.broken = lambda slices: time.sleep(seconds)


def after_one_step(max_tokens: int, forward_s: float, **hello: object) -> tuple[Engine, TableModel, ScriptedDrafter, Sequence]:
    """A greedy request of one token, to which a first step of so many seconds added two, one of them drafted."""
    engine, model = make_engine(eos_bias=-99)
    drafter = ScriptedDrafter(engine, **hello)  # type: ignore[arg-type]  # of Hello's own types
    sequence = engine.submit(TokenRequest([1], max_tokens, GREEDY), Client())
    slow_forward(model, forward_s)
    engine.drain_inbox()
    drafter.propose(sequence.id, model.greedy([1], 1))
    engine.step()
    return engine, model, drafter, sequence


@pytest.mark.parametrize(("due_s", "steps"), [(0.02, 1), (0.13, 1), (0.17, 2)])
def test_waiting_to_the_limit_is_as_fast_as_going_on_without(due_s: float, steps: int) -> None:
    tokens, forward_s, plain_s, stands = 3.0, 0.12, 0.1, 0.7
    rate = (stands * tokens + steps) / (stands * forward_s + max(steps * plain_s, due_s))
    limit_s = patience_s((1.0, 9.0), due_s, rate, 1, plain_s, stands)
    assert tokens / (forward_s + limit_s) == pytest.approx(rate)


def test_of_waiting_and_going_on_the_faster_way_counts() -> None:
    def rate(wait_s: float, busy_s: float = 0.0) -> float:
        return goodput(3.0, 0.12, wait_s, busy_s, (1.0, 0.1), stands=0.8)

    assert rate(0.0) == pytest.approx(3 / 0.12)
    assert rate(0.001) == pytest.approx(3 / 0.121)
    assert rate(0.09) == rate(0.1) == pytest.approx((0.8 * 3 + 1) / (0.8 * 0.12 + 0.1)), "hidden behind one step, however long"
    assert rate(0.09, busy_s=0.09) == pytest.approx(3 / 0.21), "not on the target's own cores"
    assert rate(0.13) == pytest.approx((0.8 * 3 + 1) / (0.8 * 0.12 + 0.13)), "the little that is left is waited for"
    assert rate(0.17) == pytest.approx((0.8 * 3 + 2) / (0.8 * 0.12 + 0.2))
    assert rate(60.0) > 1 / 0.1, "never under plain decoding"


def test_a_batch_waits_for_many_drafts_longer_than_for_one() -> None:
    rate, plain_s = 8 * 2.0 / 0.1, 0.1
    one = patience_s((1.0, 3.0), 0.01, rate, 8, plain_s, 0.8)
    assert one == pytest.approx((0.1 - 0.05) / 8 / 0.8)
    assert patience_s((2.0, 3.0), 0.01, rate, 8, plain_s, 0.8) == 0.0, "what is there already is as good as what the batch makes"
    assert patience_s((1.0, 3.0), 0.01, 8 / plain_s, 8, plain_s, 0.8) == 0.0, "plain steps are as fast"
    assert patience_s((1.0, 1.2), 0.3, rate, 8, plain_s, 0.001) == pytest.approx(0.2 / rate), "no more than what comes of it"


def test_a_drafter_that_skips_is_not_waited_for() -> None:
    engine, _, drafter, sequence = after_one_step(10, 0.05)
    drafter.handle.round_trip.observe(0.01)
    for _ in range(3):
        engine.planner.plan(engine.scheduler.running.values())
    late, budget_s = engine.planner.worth_waiting_for(engine.scheduler.running.values())
    assert late
    assert budget_s > 0.02
    drafter.skip(sequence.id)
    assert not engine.planner.worth_waiting_for(engine.scheduler.running.values())[0]


def test_a_draft_that_takes_too_long_is_used_when_it_comes_and_not_waited_for() -> None:
    engine, model, drafter, sequence = after_one_step(20, 0.02)
    truth = model.greedy([1], 20)
    assert sequence.tokens == [1, *truth[:2]]
    drafter.handle.round_trip.observe(0.03)
    for _ in range(3):
        engine.planner.plan(engine.scheduler.running.values())
    assert not engine.planner.worth_waiting_for(engine.scheduler.running.values())[0]
    asked = drafter.length[sequence.id]
    engine.step()
    assert sequence.tokens == [1, *truth[:3]]
    assert drafter.length[sequence.id] == asked + 1
    # Sent before the drafter heard of the third token.
    engine.drafting.take(drafter.handle, DraftBatch([Proposal(sequence.id, asked, truth[2:7])]))
    engine.step()
    assert sequence.tokens == [1, *truth[:8]]


def test_a_draft_of_little_worth_does_not_hold_up_the_batch() -> None:
    engine, _ = make_engine(eos_bias=-99, limits=Limits(DepthPolicy()))
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
        for _ in range(4):
            engine.planner.plan(engine.scheduler.running.values())
        for sequence in (good, poor):
            assignment = sequence.assignments["scripted"]
            assignment.answered_length, assignment.asked_at, assignment.told_at = 1, {}, time.monotonic()
        worth, budget_s = engine.planner.worth_waiting_for(engine.scheduler.running.values())
        assert budget_s <= 0.05
        return [sequence for sequence in (good, poor) if sequence.assignments["scripted"] in worth]

    assert good in waited_for()
    assert waited_for(good) == []


def test_who_mostly_has_no_draft_is_not_waited_for() -> None:
    engine, _, drafter, sequence = after_one_step(90, 0.05)
    assignment = sequence.assignments["scripted"]

    def is_waited_for() -> bool:
        for _ in range(7):
            drafter.handle.round_trip.observe(0.008)
        for _ in range(3):
            engine.planner.plan(engine.scheduler.running.values())
        assignment.asked_at, assignment.told_at = {}, time.monotonic()
        return bool(engine.planner.worth_waiting_for(engine.scheduler.running.values())[0])

    assert is_waited_for()
    for _ in range(12):
        drafter.skip(sequence.id)
        engine.step()
    assert assignment.answer_rate < 0.1
    assert not is_waited_for()


def test_what_else_arrives_does_not_end_a_wait_or_make_the_drafter_seem_slow(virtual: VirtualTime) -> None:
    engine, model, drafter, sequence = after_one_step(20, 0.1)
    truth = model.greedy([1], 20)
    for _ in range(7):
        drafter.handle.round_trip.observe(0.03)
    virtual.drives(engine)
    for at_s in (0.005, 0.01, 0.015):
        virtual.after(at_s, lambda: engine.post(lambda: None))
    virtual.after(0.03, lambda: engine.post(lambda: drafter.propose(sequence.id, truth[2:6])))
    for _ in range(3):
        engine.planner.plan(engine.scheduler.running.values())
    engine._await_drafts()
    assert sequence.assignments["scripted"].trie.path(9).token_ids == truth[2:6]
    assert drafter.handle.round_trip.value < 0.06


def test_one_request_after_the_other_is_drafted_from_its_first_token_on(virtual: VirtualTime) -> None:
    engine, model = make_engine(eos_bias=-99, limits=Limits(DepthPolicy()))
    slow_forward(model, 0.01)
    virtual.drives(engine)
    engine.warm_up()
    drafter = ScriptedDrafter(engine)
    for _ in range(3):
        sequence = engine.submit(TokenRequest([1], 6, GREEDY), Client())
        engine.drain_inbox()
        assert sequence.assignments["scripted"].pause.steps_left == 0
        drafter.propose(sequence.id, model.greedy([1], 6))
        while sequence.id in engine.sequences:
            engine._await_drafts()
            engine.step()


def test_who_is_not_waited_for_is_asked_for_more() -> None:
    engine, model = make_engine(eos_bias=-99)
    drafter = ScriptedDrafter(engine)
    slow_forward(model, 0.01)
    engine.submit(TokenRequest([1], 60, GREEDY), Client())
    engine.drain_inbox()

    def asked(reply_s: float) -> int:
        for _ in range(7):
            drafter.handle.round_trip.observe(reply_s)
        for _ in range(4):
            engine.planner.plan(engine.scheduler.running.values())
            engine.step()
        [assignment] = next(iter(engine.sequences.values())).assignments.values()
        return assignment.draft_tokens

    assert asked(0.0) == 4
    assert asked(0.025) in (6, 7), "two or three steps go on meanwhile"


def test_no_more_is_waited_for_than_the_drafter_said_it_can() -> None:
    engine, model, drafter, sequence = after_one_step(20, 0.05, max_draft_tokens=2)
    drafter.propose(sequence.id, model.greedy(sequence.tokens, 2))
    assert not engine.planner.worth_waiting_for(engine.scheduler.running.values())[0]


def test_a_drafter_that_may_be_at_the_prompt_is_not_waited_for() -> None:
    engine, model = make_engine(eos_bias=-99)
    drafter = ScriptedDrafter(engine)
    engine.submit(TokenRequest([1, 2], 10, GREEDY), Client())
    slow_forward(model, 0.05)
    engine.step()
    assert not engine.planner.worth_waiting_for(engine.scheduler.running.values())[0]
    assert drafter.handle.latency(4) == 0


def test_a_drafter_that_falls_silent_stops_being_waited_for(virtual: VirtualTime) -> None:
    engine, model = make_engine(eos_bias=-99)
    slow_forward(model, 0.01)
    virtual.drives(engine)
    drafter, client = ScriptedDrafter(engine), StopsAt(engine, 150)
    sequence = engine.submit(TokenRequest([1, 2], 150, GREEDY), client)
    engine.drain_inbox()
    drafter.propose(sequence.id, model.greedy([1, 2], 4))
    assert sequence.assignments["scripted"].answered_length == 2
    engine.run()
    assert client.arrived_s[149] - client.arrived_s[99] == pytest.approx(50 * 0.01)


def test_a_prompt_answer_is_waited_for_and_used(virtual: VirtualTime) -> None:
    engine, model = make_engine(eos_bias=-99)
    slow_forward(model, 0.02)
    virtual.drives(engine)
    drafter, client = ScriptedDrafter(engine), StopsAt(engine, 60)
    truth = model.greedy([1, 2], 60)
    deliver = engine.outgoing._deliver

    def answer_soon(deliveries: list[object]) -> None:
        deliver(deliveries)  # type: ignore[arg-type]

        def answer() -> None:
            done = len(sequence.tokens) - 2
            if sequence.id in engine.sequences and done < 55:
                drafter.propose(sequence.id, truth[done : done + 4], anew=True)

        if any(isinstance(argument, StepBatch) for _, argument in deliveries):  # type: ignore[misc]
            virtual.after(0.004, lambda: engine.post(answer))

    engine.outgoing._deliver = answer_soon  # type: ignore[assignment]
    sequence = engine.submit(TokenRequest([1, 2], 60, GREEDY), client)
    engine.run()
    assert client.tokens == truth
    assert client.chunks[-1].stats is not None
    assert client.chunks[-1].stats.forward_count < 25


def test_a_drafter_that_is_always_wrong_is_paused_and_then_told_all_it_missed(virtual: VirtualTime) -> None:
    engine, model = make_engine(eos_bias=-99, page_count=128)
    model.broken = lambda slices: time.sleep(sum(len(part.token_ids) for part in slices) * 0.0005)
    virtual.drives(engine)
    engine.warm_up()
    drafter, client = ScriptedDrafter(engine), Client()
    sequence = engine.submit(TokenRequest([1, 2], 200, GREEDY), client)
    engine.drain_inbox()
    asked = 0
    for _ in range(400):
        if sequence.id not in engine.sequences:
            break
        trie = sequence.assignments["scripted"].trie
        if trie.node_count == 0 and drafter.length[sequence.id] == len(sequence.tokens):
            wrong = [(token + 1) % 7 for token in model.greedy(sequence.tokens, 1)] * 3
            drafter.propose(sequence.id, wrong, anew=True)
            asked += 1
        engine._await_drafts()
        engine.step()
    assert client.tokens == model.greedy([1, 2], 200)
    assert asked < 30
    verdicts = [verdict for batch in drafter.told for verdict in batch.verdicts]
    assert max(len(verdict.new_token_ids) for verdict in verdicts) > 16
    told = [token for verdict in verdicts for token in verdict.new_token_ids]
    assert told == client.tokens[: len(told)]


def test_an_answer_that_came_during_a_forward_is_not_charged_with_the_rest_of_it() -> None:
    engine, model = make_engine(eos_bias=-99)
    drafter = ScriptedDrafter(engine)
    sequence = engine.submit(TokenRequest([1], 20, GREEDY), Client())
    engine.drain_inbox()
    drafter.propose(sequence.id, model.greedy([1], 1))
    engine.step()
    length, asked_at = next(iter(sequence.assignments["scripted"].asked_at.items()))
    slow_forward(model, 0.4)
    engine.step()
    answer = Proposal(sequence.id, length, [3])
    engine.drafting.take(drafter.handle, DraftBatch([answer]), arrived_at=asked_at + 0.003)
    assert drafter.handle.round_trip.value < 0.1
