"""A sequence with slow masks leaves the batch. No other sequence waits, and no text changes."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from outrider.errors import OutriderError, Reason
from outrider.grammar.backends import Mask, MaskLimit
from outrider.grammar.kinds import Grammar, GrammarKind
from outrider.process.workers.tenant_threads import TenantThreads
from outrider.protocol.draft_messages import Proposal, SparseDistribution
from outrider.protocol.messages import DraftDistribution, FinishReason, SamplingParams, TokenRequest
from tests.toy_grammars import Alternating
from tests.verifier.fake_model import EOS, VOCAB, Client, ScriptedDrafter, finish, make_engine
from verifier_svc.engine.config import EngineConfig
from verifier_svc.engine.loop import Engine
from verifier_svc.state.mask_work import MaskWork
from verifier_svc.state.trie import NO_DRAFT
from verifier_svc.verification.grammar_masks import GrammarMasks, has_slow_masks
from verifier_svc.verification.mask_lanes import MaskBudget, Threads

GRAMMAR = Grammar(GrammarKind.EBNF, "root ::= root root | [a-z]")
LONG = 24


class Held:
    """Computes masks only when the test says so, so every step finds its masks late."""

    def __init__(self) -> None:
        self.begun: list[MaskWork] = []
        self.slow: list[MaskWork] = []

    def begin(self, works: Sequence[MaskWork], tenant: str) -> None:
        self.begun += works

    def begin_slow(self, work: MaskWork, tenant: str) -> None:
        self.slow.append(work)

    def wait(self, works: Sequence[MaskWork], seconds: float) -> None:
        """Return at once: no mask is ready in time."""

    def let_go(self) -> None:
        """Compute all masks that have been asked for."""
        for work in [*self.begun, *self.slow]:
            work.run()
        self.begun.clear()
        self.slow.clear()


def engine_with(held: Held | None, seconds: float = 1e9, *, trust: bool = False) -> Engine:
    engine, _ = make_engine(eos_bias=-99, trust=trust, always_draft=trust)
    if held is not None:
        engine._grammar_masks = GrammarMasks(held, MaskBudget(seconds, engine.clock), engine._wake)
    return engine


def request(sampling: SamplingParams, max_tokens: int = LONG, tenant: str = "") -> TokenRequest:
    return TokenRequest([3, 1], max_tokens, sampling, grammar=GRAMMAR, tenant=tenant)


def proposed(engine: Engine, drafter: ScriptedDrafter, truth: list[int], done: int) -> None:
    """Propose the next tokens, sometimes with a mistake."""
    for sequence_id in list(engine.scheduler.running):
        guess = truth[done : done + 3]
        if done % 4 == 1 and guess:
            guess[-1] = (guess[-1] + 2) % VOCAB
        if guess:
            drafter.propose(sequence_id, guess, anew=True)


SETTINGS = [
    SamplingParams(0.0),
    SamplingParams(0.7, top_p=0.9, seed=9),
]


@pytest.mark.parametrize("sampling", SETTINGS, ids=["greedy", "truncated"])
def test_late_masks_change_no_token(sampling: SamplingParams) -> None:
    plain = engine_with(None)
    client = Client()
    plain.submit(request(sampling), client, matcher=Alternating())
    finish(plain)
    truth = client.tokens
    assert len(truth) == LONG

    held = Held()
    late = engine_with(held)
    drafter = ScriptedDrafter(late)
    other = Client()
    late.submit(request(sampling), other, matcher=Alternating())
    steps = 0
    while late.sequences:
        late.drain_inbox()
        proposed(late, drafter, truth, len(other.tokens))
        before = len(other.tokens)
        for _ in range(2):
            late.step()
        late.outbox.send_to_clients()
        assert len(other.tokens) == before
        held.let_go()
        late.step()
        late.outbox.send_to_clients()
        steps += 1
    assert other.tokens == truth
    # Drafts are kept while their masks are computed, and verified with them.
    assert steps < LONG
    late.pool.check_integrity()
    assert late.pool.used_count == 0


SAMPLES = frozenset({DraftDistribution.ONE_HOT, DraftDistribution.SPARSE})


def sampled_texts(seed: int, held: Held | None) -> tuple[list[int], int]:
    """Return the tokens of a request with sampled drafts, and its number of accepted tokens."""
    engine = engine_with(held, trust=True)
    drafter = ScriptedDrafter(engine, distributions=SAMPLES)
    client = Client()
    sampling = SamplingParams(1.0, seed=seed)
    engine.submit(request(sampling), client, matcher=Alternating())
    accepted = 0
    while engine.sequences:
        engine.drain_inbox()
        for sequence in engine.scheduler.running.values():
            # The draft depends only on seed and position. The grammar forbids half of its tokens.
            choose = np.random.default_rng([seed, len(sequence.tokens)])
            ids = np.arange(2, VOCAB)
            share = SparseDistribution(ids, np.full(len(ids), 1 / len(ids)))
            tokens = [int(token) for token in choose.choice(ids, 3)]
            length = len(sequence.tokens)
            drafter.send(Proposal(sequence.id, length, tokens, [], [share] * 3))
            accepted = sequence.stats.accepted_token_count
        engine.step()
        if held is not None:
            engine.step()
            held.let_go()
            engine.step()
        engine.outbox.send_to_clients()
    engine.pool.check_integrity()
    return client.tokens, accepted


def test_late_masks_change_no_token_of_sampled_drafts() -> None:
    accepted = 0
    for seed in range(8):
        tokens, count = sampled_texts(seed, None)
        assert len(tokens) == LONG
        assert sampled_texts(seed, Held()) == (tokens, count)
        accepted += count
    assert accepted > 0


@pytest.mark.parametrize("attackers", ["a", "ac"])
def test_others_go_on_while_masks_are_late(attackers: str) -> None:
    held = Held()
    engine = engine_with(held)
    bombs, other = [Client() for _ in attackers], Client()
    for tenant, bomb in zip(attackers, bombs, strict=True):
        engine.submit(request(SamplingParams(0.0), tenant=tenant), bomb, matcher=Alternating())
    engine.submit(TokenRequest([2, 4], 10, SamplingParams(0.0)), other)
    for _ in range(12):
        engine.step()
    engine.outbox.send_to_clients()
    assert other.finish_reason is FinishReason.LENGTH
    assert [bomb.tokens for bomb in bombs] == [[]] * len(bombs)
    assert engine.advance() == pytest.approx(0.05)
    held.let_go()
    assert engine.advance() == 0.0
    engine.outbox.send_to_clients()
    assert [len(bomb.tokens) for bomb in bombs] == [1] * len(bombs)


def test_a_sequence_can_end_while_its_masks_are_computed() -> None:
    held = Held()
    engine = engine_with(held)
    sequence = engine.submit(request(SamplingParams(0.0)), Client(), matcher=Alternating())
    engine.step()
    [work] = held.begun
    engine.cancel(sequence)
    held.let_go()
    # The work had not started, so it never starts.
    assert work.mask is None
    engine.step()
    engine.pool.check_integrity()
    assert engine.pool.used_count == 0


def spent(work: MaskWork, seconds: float) -> None:
    """Make finished work seem to have taken this much processor time."""
    work._seconds = seconds


def test_slow_masks_come_before_the_step_and_without_drafts() -> None:
    held = Held()
    engine = engine_with(held)
    drafter = ScriptedDrafter(engine)
    client = Client()
    sequence = engine.submit(request(SamplingParams(0.0)), client, matcher=Alternating())
    engine.step()
    [work] = held.begun
    held.let_go()
    spent(work, 0.5)
    engine.step()
    [slow] = held.slow
    drafter.propose(sequence.id, [1], anew=True)
    forwards = engine.model.forward_count  # type: ignore[attr-defined]
    for _ in range(3):
        engine.step()
    assert engine.model.forward_count == forwards  # type: ignore[attr-defined]
    assert slow.draft is NO_DRAFT
    held.let_go()
    engine.step()
    assert engine.model.forward_count == forwards + 1  # type: ignore[attr-defined]


def run_of(engine: Engine, held: Held, seconds: float, client: Client) -> int:
    """Serve masks until the client's request ends; return their number. A mask takes `seconds`."""
    count = 0
    while client.error is None and client.finish_reason is None:
        engine.advance()
        for work in [*held.begun, *held.slow]:
            work.run()
            spent(work, seconds)
            count += 1
        held.begun.clear()
        held.slow.clear()
        engine.advance()
        engine.outbox.send_to_clients()
    return count


@pytest.mark.parametrize("tenants", ["a", "ab"])
def test_a_request_ends_when_its_masks_have_used_up_their_budget(tenants: str) -> None:
    held = Held()
    engine = engine_with(held, seconds=1.0)
    clients = [Client() for _ in tenants]
    for tenant, client in zip(tenants, clients, strict=True):
        engine.submit(request(SamplingParams(0.0), tenant=tenant), client, matcher=Alternating())
    assert run_of(engine, held, 0.22, clients[-1]) == 6 * len(tenants)
    for client in clients:
        assert client.error is not None
        assert client.error.reason is Reason.INVALID_VALUE
        assert client.error.field == "grammar.ebnf"
        assert "masks take more than 1 s of processor time" in client.error.message
        assert len(client.tokens) == 5


@pytest.mark.parametrize("attackers", ["a", "ac"])
def test_a_tenants_budget_is_that_of_five_requests_and_comes_back(attackers: str) -> None:
    now = 0.0
    budget = MaskBudget(1.0, lambda: now)
    engine = engine_with(None)
    ends: Counter[str] = Counter()
    for tenant in [*attackers] * 8 + ["b"]:
        asked = request(SamplingParams(0.0), tenant=tenant)
        sequence = engine.submit(asked, Client(), matcher=Alternating())
        work = sequence.mask_work = MaskWork(lambda: None, NO_DRAFT, "")  # type: ignore[return-value]
        spent(work, 0.92)
        error = budget.error(sequence)
        budget.charge(sequence, work)
        ends[f"{tenant} {error.reason.name if error else 'goes on'}"] += 1
    refused = {f"{name} RATE_LIMIT_EXCEEDED": 3 for name in attackers}
    assert ends == {f"{name} goes on": 5 for name in attackers} | refused | {"b goes on": 1}
    now = 100.0
    sequence = engine.submit(request(SamplingParams(0.0), tenant="a"), Client())
    sequence.mask_work = MaskWork(lambda: None, NO_DRAFT, "")  # type: ignore[return-value]
    spent(sequence.mask_work, 0.92)
    assert budget.error(sequence) is None


@pytest.mark.parametrize(
    ("failure", "reason", "field"),
    [
        (RuntimeError("broken"), Reason.INTERNAL, None),
        (MaskLimit(), Reason.INVALID_VALUE, "grammar.ebnf"),
    ],
    ids=["a defect", "beyond the backend's limits"],
)
def test_a_failing_matcher_ends_its_sequence_alone(
    failure: Exception, reason: Reason, field: str | None
) -> None:
    class Broken(Alternating):
        def fill(self, mask: Mask, row: int) -> None:
            raise failure

    engine = engine_with(Held())
    bad, good = Client(), Client()
    engine.submit(request(SamplingParams(0.0)), bad, matcher=Broken())
    engine.submit(TokenRequest([2, 4], 5, SamplingParams(0.0)), good)
    held = engine._grammar_masks._lanes
    assert isinstance(held, Held)
    while engine.sequences:
        engine.advance()
        held.let_go()
    engine.outbox.send_to_clients()
    assert isinstance(bad.error, OutriderError)
    assert (bad.error.reason, bad.error.field) == (reason, field)
    assert field is None or "masks became too expensive" in bad.error.message
    assert good.finish_reason is FinishReason.LENGTH


class CostlyAfter(Alternating):
    """Refuses to compute masks after the token `costly`, which no text of the tests has."""

    def __init__(self, costly: int) -> None:
        super().__init__()
        self._costly = costly

    def fill(self, mask: Mask, row: int) -> None:
        if self.text[-1:] == [self._costly]:
            raise MaskLimit
        super().fill(mask, row)


@pytest.mark.parametrize("are_late", [False, True], ids=["in time", "late"])
@pytest.mark.parametrize("sampling", SETTINGS, ids=["greedy", "truncated"])
def test_a_draft_whose_mask_is_too_expensive_changes_no_text(
    are_late: bool, sampling: SamplingParams
) -> None:
    plain = engine_with(None)
    client = Client()
    plain.submit(request(sampling, 8), client, matcher=Alternating())
    finish(plain)
    truth = client.tokens
    # The grammar allows this token at every other place.
    costly = next(token for token in range(0, VOCAB, 2) if token not in truth)

    held = Held() if are_late else None
    engine = engine_with(held)
    drafter = ScriptedDrafter(engine)
    other = Client()
    engine.submit(request(sampling, 8), other, matcher=CostlyAfter(costly))
    for _ in range(10 * len(truth)):
        engine.drain_inbox()
        guess = truth[len(other.tokens) :][:2]
        guess[len(other.tokens) % 2 :] = [costly]
        for sequence_id in list(engine.scheduler.running):
            drafter.propose(sequence_id, guess, anew=True)
        engine.step()
        if held is not None:
            held.let_go()
        engine.outbox.send_to_clients()
        if not engine.sequences:
            break
    assert other.error is None
    assert other.tokens == truth


@pytest.mark.parametrize("attackers", ["a", "ac"])
def test_masks_in_progress_delay_neither_another_tenants_nor_slow_ones(attackers: str) -> None:
    """A single tenant gets one of the two threads for slow masks.

    Two tenants get both threads, and tenant b has the next turn.
    """
    lanes = Threads()
    release, free = threading.Event(), threading.Event()
    stuck = {
        name: [MaskWork(lambda: release.wait(5), NO_DRAFT, "") for _ in range(5)]  # type: ignore[return-value]
        for name in attackers
    }
    first = MaskWork(lambda: free.wait(5), NO_DRAFT, "")  # type: ignore[return-value]
    quick = [MaskWork(lambda: None, NO_DRAFT, "") for _ in range(2)]  # type: ignore[return-value]
    lanes.begin_slow(first, attackers[-1])
    for name, works in stuck.items():
        lanes.begin(works[:2], name)
        for work in works[2:]:
            lanes.begin_slow(work, name)
    lanes.begin(quick[:1], "b")
    lanes.begin_slow(quick[1], "b")
    lanes.wait(quick[:1], 4.0)
    if len(attackers) == 2:
        free.set()
    lanes.wait(quick, 4.0)
    assert all(work.done for work in quick)
    assert not any(work.done for works in stuck.values() for work in works)
    free.set()
    release.set()
    for works in stuck.values():
        lanes.wait(works, 60.0)
    for threads in (lanes._fast, lanes._slow):
        assert isinstance(threads, TenantThreads)
        threads.close()


def test_a_recomputed_prompt_asks_once_for_slow_masks() -> None:
    """The masks were asked for before the preemption, and the text has not changed."""
    config = EngineConfig(max_batch_tokens=16)
    engine, _ = make_engine(eos_bias=-99, config=config)
    held = Held()
    engine._grammar_masks = GrammarMasks(held, MaskBudget(1e9, engine.clock), engine._wake)
    asked = TokenRequest([1, 2] * 40, 20, SamplingParams(seed=3), ignore_eos=True)
    sequence = engine.submit(asked, Client(), matcher=Alternating())
    sequence.mask_row_s = 0.01
    while len(sequence.tokens) < 82:
        engine.advance()
        held.let_go()
        sequence.mask_row_s = 0.01
    engine.pool._prefix_caching = False
    engine.scheduler._preempt(sequence)
    engine._intake.admit()
    begun: list[MaskWork] = []
    while len(sequence.tokens) < 83:
        engine.advance()
        begun += [*held.begun, *held.slow]
        held.let_go()
    assert len({id(work) for work in begun}) <= 1


class OnePair(Alternating):
    """An even and an odd token, and then the end of the text."""

    @property
    def ended(self) -> bool:
        return self.text[-1:] == [EOS]

    def allows(self, token: int) -> bool:
        return token == EOS if len(self.text) == 2 else super().allows(token)


@pytest.mark.parametrize("are_slow", [False, True], ids=["quick", "slow"])
def test_a_text_ends_with_its_grammar_even_if_ends_are_ignored(are_slow: bool) -> None:
    held = Held()
    engine = engine_with(held)
    client = Client()
    asked = replace(request(SamplingParams(0.0)), ignore_eos=True)
    sequence = engine.submit(asked, client, matcher=OnePair())
    for _ in range(20):
        engine.advance()
        works = [*held.begun, *held.slow]
        held.let_go()
        for work in works:
            spent(work, 0.02 if are_slow else 0.0)
    assert has_slow_masks(sequence) is are_slow
    engine.outbox.send_to_clients()
    assert client.error is None
    assert client.finish_reason is FinishReason.STOP
    assert (len(client.tokens), client.tokens[-1]) == (3, EOS)


@pytest.mark.parametrize("others_go_on", [True, False])
def test_an_unread_answer_ends_when_its_masks_have_used_up_their_budget(
    others_go_on: bool,
) -> None:
    held = Held()
    engine = engine_with(held, seconds=1.0)
    unread, other = Client(), Client()
    sequence = engine.submit(request(SamplingParams(0.0)), unread, matcher=Alternating())
    engine.step()
    [work] = held.begun
    if others_go_on:
        engine.submit(TokenRequest([2, 4], 20, SamplingParams(0.0)), other)
    engine.pause(sequence)
    held.let_go()
    for seconds in (0.9, 1.1):
        assert unread.error is None
        spent(work, seconds)
        engine.advance()
        engine.outbox.send_to_clients()
    assert unread.error is not None
    assert "masks take more than 1 s of processor time" in unread.error.message
    assert sequence.id not in engine.sequences
    assert other.error is None
