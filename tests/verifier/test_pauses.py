"""A request learns why it got no drafts, and may demand drafts. All tests run in virtual time."""

from __future__ import annotations

import math
from functools import partial

import pytest

from outrider.errors import OutriderError
from outrider.protocol.draft_messages import DraftBatch, Proposal, Skip, StepBatch
from outrider.protocol.draft_tokens_policy import DraftTokensPolicy
from outrider.protocol.messages import (
    PauseReason,
    SpeculationOptions,
    SpeculationPause,
    TokenRequest,
)
from tests.verifier.fake_model import GREEDY, Client, ScriptedDrafter, exposition, make_engine
from tests.virtual_time import VirtualClock
from verifier_svc.engine.config import EngineConfig
from verifier_svc.engine.loop import Engine

INSISTS = SpeculationOptions(always_draft=True)
STEP_S = 0.001
MAX_TOKENS = 60


class DistantDrafter(ScriptedDrafter):
    """Guesses every token right, `delay_s` after it was asked; without `knows` it only skips."""

    def __init__(self, stack: Stack, delay_s: float, *, knows: bool) -> None:
        self.stack = stack
        self.delay_s = delay_s
        self.knows = knows
        super().__init__(stack.engine)

    def _sink(self, message: StepBatch | OutriderError) -> None:
        super()._sink(message)
        if isinstance(message, OutriderError) or self.delay_s == math.inf:
            return
        asked = [opened.sequence_id for opened in message.opened]
        asked += [verdict.sequence_id for verdict in message.verdicts]
        for sequence_id in asked:
            answer = partial(self.answer, sequence_id, self.length[sequence_id])
            self.stack.clock.after(self.delay_s, answer)

    def answer(self, sequence_id: int, length: int) -> None:
        """Answer the message about this committed length."""
        sequence = self.engine.sequences.get(sequence_id)
        if sequence is None:
            return
        batch = DraftBatch(skips=[Skip(sequence_id, length)])
        if self.knows:
            text = self.stack.model.greedy(sequence.tokens[:length], 8)
            batch = DraftBatch([Proposal(sequence_id, length, text)])
        self.engine.drafting.on_drafts(self.handle, batch)


class Stack:
    """An engine whose forwards take STEP_S seconds, and its drafters."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.engine: Engine
        self.engine, self.model = make_engine(
            eos_bias=-99, clock=self.clock, page_count=256, config=EngineConfig(DraftTokensPolicy())
        )
        self.model.broken = lambda slices: self.clock.sleep(STEP_S)
        for batch in (1, 2):
            for drafted in (0, 8):
                cost = (batch, batch * (1 + drafted), STEP_S)
                self.engine.cost.calibrate(*cost)
                self.engine.isolated_cost.calibrate(*cost)

    def join(self, delay_s: float, *, knows: bool = True) -> None:
        DistantDrafter(self, delay_s, knows=knows)

    def ask(self, speculation: SpeculationOptions | None = None, tenant: str = "a") -> Client:
        client = Client()
        speculation = speculation or SpeculationOptions()
        request = TokenRequest([1], MAX_TOKENS, GREEDY, speculation=speculation, tenant=tenant)
        self.engine.submit(request, client)
        return client

    def get(self, speculation: SpeculationOptions | None = None) -> Client:
        client = self.ask(speculation)
        self.clock.finish(self.engine)
        return client


def paused(client: Client) -> SpeculationPause | None:
    stats = client.chunks[-1].stats
    assert stats is not None
    return stats.paused


def drafted(client: Client) -> int:
    stats = client.chunks[-1].stats
    assert stats is not None
    return stats.draft_token_count


def settled(stack: Stack) -> Stack:
    """Return the stack after its first requests, which measure drafters and baseline steps."""
    for _ in range(3):
        stack.get()
    return stack


def test_without_a_drafter_the_answer_says_so() -> None:
    stack = Stack()
    pause = paused(stack.get())
    assert pause is not None
    # The first step and the last one have no room for a draft.
    assert (pause.reason, pause.step_count) == (PauseReason.NO_DRAFTER, MAX_TOKENS - 2)
    assert pause.draft_s is None
    assert 'paused_steps_total{model_name="fake",reason="no_drafter"} 58.0' in exposition(
        stack.engine
    )


def test_a_slow_drafter_is_named_with_both_times() -> None:
    stack = Stack()
    stack.join(0.01)
    pause = paused(settled(stack).get())
    assert pause is not None
    assert pause.reason in (PauseReason.TOO_SLOW, PauseReason.BUDGET)
    assert pause.forward_s == pytest.approx(STEP_S, rel=0.2)
    assert pause.draft_s is not None
    assert pause.draft_s == pytest.approx(0.01)


@pytest.mark.parametrize(("delay_s", "value"), [(0.01, 1.0), (0.0001, 0.0)])
def test_a_gauge_says_whether_a_drafter_is_paused(delay_s: float, value: float) -> None:
    stack = Stack()
    stack.join(delay_s)
    settled(stack)
    labels = 'drafter="scripted",family="scripted",model_name="fake",placement="local"'
    assert f"outrider:drafting_paused{{{labels}}} {value}" in exposition(stack.engine)


def test_plain_decoding_by_request_is_no_pause() -> None:
    stack = Stack()
    stack.join(0.0001)
    assert paused(stack.get(SpeculationOptions(enabled=False))) is None
    assert paused(stack.get(SpeculationOptions(draft_tokens=0))) is None
    assert "paused_steps_total{" not in exposition(stack.engine)


def test_a_request_that_insists_gets_drafts_where_they_do_not_pay() -> None:
    stack = Stack()
    stack.join(0.01)
    settled(stack)
    assert drafted(stack.get()) == 0
    for speculation in (INSISTS, SpeculationOptions(always_draft=True, draft_tokens=4)):
        client = stack.get(speculation)
        assert drafted(client) > MAX_TOKENS // 2
        assert paused(client) is None
    # Insisting requests do not change which drafts pay.
    assert drafted(stack.get()) == 0


@pytest.mark.parametrize("other_tenant", [False, True])
def test_insisting_does_not_slow_down_another_request(other_tenant: bool) -> None:
    """The other request does not insist; or it insists, and is another tenant's request."""

    def steps_s(others: SpeculationOptions) -> float:
        stack = Stack()
        stack.join(0.01)
        settled(stack)
        began = stack.clock()
        stack.ask(others)
        other = stack.ask(INSISTS, "b") if other_tenant else stack.ask()
        stack.clock.finish(stack.engine)
        assert len(other.tokens) == MAX_TOKENS
        return stack.clock() - began

    assert steps_s(INSISTS) == steps_s(SpeculationOptions())


def test_a_silent_drafter_costs_an_insisting_request_50_ms_a_step() -> None:
    stack = Stack()
    stack.join(math.inf)
    began = stack.clock()
    client = stack.get(INSISTS)
    assert len(client.tokens) == MAX_TOKENS
    assert stack.clock() - began < MAX_TOKENS * (0.05 + 2 * STEP_S)
