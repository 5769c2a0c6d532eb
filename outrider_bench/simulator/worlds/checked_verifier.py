"""A verifier in a simulated world: the production engine, checked after each step and message."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from outrider.errors import OutriderError
from outrider.lm.pages import PagePool
from outrider.protocol.draft_messages import DraftBatch, Hello, StepBatch
from outrider.protocol.draft_tokens_policy import DraftTokensPolicy
from outrider.protocol.messages import AcceptanceRule, TokenChunk, TokenRequest
from outrider_bench.simulator.engine_actor import EngineActor
from outrider_bench.simulator.events import Events
from outrider_bench.simulator.worlds.invariants import (
    Truth,
    broken,
    check_batch,
    check_step,
    compares,
    expected_counts,
)
from outrider_bench.simulator.worlds.plan import EnginePlan
from outrider_bench.simulator.worlds.requests import answer_of, matcher_of
from outrider_bench.simulator.worlds.target import PagedTarget
from verifier_svc.engine.config import EngineConfig
from verifier_svc.engine.loop import Engine
from verifier_svc.metrics import VerifierMetrics
from verifier_svc.policy.draft_policy import EVERY_DRAFT, PAYING_DRAFTS
from verifier_svc.state.drafter import Drafter
from verifier_svc.state.sequence import Sequence
from verifier_svc.verification.batch import DraftVerifier

_CONTEXT = 64
# The engine's clock begins at this time. Neighbouring floats are farther apart here than at the
# times of events. So even the engine's shortest wait, added to an event's time, gives a later time.
_EPOCH_S = 1024.0
_MOST_ADVANCES = 10_000


class CheckedVerifier(EngineActor):
    """The production engine, its scheduler, planner, tries and acceptance, on a paged target.

    `skew_s` is the error of its clock in seconds. `counts` counts its actions.
    """

    def __init__(self, events: Events, name: str, plan: EnginePlan, counts: Counter[str]) -> None:
        super().__init__(events)
        self.name = name
        self.skew_s = 0.0
        self._plan = plan
        self._counts = counts
        self._truths: dict[int, Truth] = {}
        # Maps a drafter to the length that each sequence had when it was announced to the drafter.
        self._opened: dict[Drafter, dict[int, int]] = {}
        self._proposed = (0, 0)
        self._advanced_at = (0.0, 0)  # when the engine was last called, and how often at that time
        self.target = PagedTarget(
            events, plan.page_count, plan.page_size, plan.step_s, plan.token_s
        )
        sampled_rule = AcceptanceRule.TOKEN_WISE if plan.token_wise else AcceptanceRule.BLOCK
        metrics = VerifierMetrics(name)
        # Instances of compiled classes cannot be changed; the metrics are not compiled.
        metrics.proposed = self._note_proposed  # type: ignore[method-assign]  # to see the counts
        self.engine = Engine(
            self.target,
            PagePool(plan.page_count, plan.page_size, prefix_caching=plan.prefix_caching),
            self._deliver,
            metrics,
            EngineConfig(
                draft_tokens_policy=DraftTokensPolicy.parse(plan.draft_tokens),
                max_batch_tokens=plan.max_batch_tokens,
                max_sequences=plan.max_sequences,
                max_waiting=plan.max_waiting,
                max_drafters=plan.max_drafters,
                draft_trees=plan.draft_trees,
            ),
            DraftVerifier(sampled_rule),
            launches=plan.launches,
            sampled_drafts=plan.sampled_drafts,
            draft_policy=EVERY_DRAFT if plan.always_draft else PAYING_DRAFTS,
            clock=self.clock,
        )
        if plan.warms_up:
            self._warm_up()

    def clock(self) -> float:
        """Return the time of the engine's clock."""
        return _EPOCH_S + self._events.now + self.skew_s

    def _warm_up(self) -> None:
        """Run the trial forwards in the time before now."""
        started = self._events.now
        self.target.is_warm = False
        self.engine.warm_up(_CONTEXT)
        self.target.is_warm = True
        self._events.now = started

    def submit(
        self,
        number: int,
        request: TokenRequest,
        sink: Callable[[TokenChunk | OutriderError], None],
    ) -> Sequence:
        """Submit a catalogue request on the engine's thread; raise what `Engine.submit` raises."""
        truth = Truth(
            answer_of(number), compares(request, sampled_drafts=self._plan.sampled_drafts)
        )
        matcher = matcher_of(number, request.committed)
        sequence = self.engine.submit(request, sink, matcher=matcher)
        truth.length = len(sequence.tokens)
        self._truths[sequence.id] = truth
        return sequence

    def text_of(self, sequence_id: int, prompt_length: int, tokens: list[int]) -> list[int]:
        """Return the target's text of a sequence, for drafters that know it."""
        return [*tokens[:prompt_length], *self._truths[sequence_id].answer.token_ids]

    def join(self, hello: Hello, sink: Callable[[StepBatch | OutriderError], None]) -> Drafter:
        """Register a drafter, on the engine's thread; raise what `Roster.join` raises."""
        lengths: dict[int, int] = {}

        def send(message: StepBatch | OutriderError) -> None:
            if isinstance(message, StepBatch):
                for opened in message.opened:
                    lengths[opened.sequence_id] = len(opened.token_ids)
            sink(message)

        drafter = self.engine.drafting.join(hello, send)
        self._opened[drafter] = lengths
        return drafter

    def take(self, drafter: Drafter, batch: DraftBatch, arrived_at: float) -> bool:
        """Take a drafter's message, on the engine's thread; return whether it was rejected."""
        drafting = self.engine.drafting
        if drafting.roster.connected.get(drafter.id) is not drafter:
            drafting.on_drafts(drafter, batch, 0, arrived_at)
            return False
        expected = expected_counts(self.engine, drafter, batch, self._opened[drafter])
        drafting.on_drafts(drafter, batch, 0, arrived_at)
        counted = (expected.token_count, expected.stale_count)
        if self._proposed != counted:
            broken("stale tokens are counted", f"{self._proposed}, not {counted}")
        rejected = drafting.roster.connected.get(drafter.id) is not drafter
        if rejected != expected.rejected:
            broken("only what no delay explains is a violation", f"{batch}: {rejected}")
        self._counts["stale tokens"] += expected.stale_count
        self._counts["invariants checked"] += 2
        return rejected

    def _note_proposed(
        self, drafter: Drafter, token_count: int, stale_count: int, cut_count: int
    ) -> None:
        self._proposed = (token_count, stale_count)
        self._counts["cut tokens"] += cut_count

    def _advance(self, number: int) -> None:
        time, count = self._advanced_at
        count = 1 + count * (self._events.now == time)
        self._advanced_at = (self._events.now, count)
        if count > _MOST_ADVANCES:
            broken("the engine does not wait in vain", f"{count} times at {time} s")
        preempted = self.engine.scheduler.preemption_count
        super()._advance(number)
        self._counts["preemptions"] += self.engine.scheduler.preemption_count - preempted
        if self.target.token_counts:
            self._counts["engine steps"] += 1
            self._counts["slices"] += len(self.target.token_counts)
            check_batch(self.target.token_counts, self._plan.max_batch_tokens)
            self.target.token_counts = []
        self._counts["invariants checked"] += check_step(
            self.engine, self._truths, self._plan.max_sequences
        )
