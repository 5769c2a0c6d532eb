"""The engine: a step chooses a batch, verifies its drafts, and commits what the target agrees to.

The engine runs on its own thread; other threads only `post` work to it. The engine sends messages
through sinks: to drafters after each step, to clients when the next forward begins. With a device
that computes asynchronously, the forward is launched first, and meanwhile the host does the work
that no step waits for. The engine works with token ids and drafters, without text, protobuf or
gRPC.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from outrider.errors import OutriderError, Reason
from outrider.grammar.backends import Matcher
from outrider.lm.pages import PagePool
from outrider.lm.runner import SequenceSlice
from outrider.process.clock import Clock, monotonic
from outrider.process.observability.telemetry import NO_SPAN, Span
from outrider.protocol.messages import TokenChunk, TokenRequest
from outrider.protocol.model_info import Load
from verifier_svc.drafts.exchange import DraftExchange
from verifier_svc.drafts.features import FeatureSource
from verifier_svc.engine.commit import Committer, moved_slots
from verifier_svc.engine.config import EngineConfig, LanguageModel
from verifier_svc.engine.context import EngineContext
from verifier_svc.engine.draft_wait import DraftWait
from verifier_svc.engine.endings import Endings
from verifier_svc.engine.intake import Inbox, Intake
from verifier_svc.engine.outbox import Delivery, Outbox
from verifier_svc.engine.scheduler import Scheduler
from verifier_svc.engine.sequence_book import SequenceBook
from verifier_svc.engine.step_spans import StepSpans
from verifier_svc.engine.warm_up import WarmUp
from verifier_svc.metrics import VerifierMetrics
from verifier_svc.policy.draft_policy import PAYING_DRAFTS, DraftPolicy
from verifier_svc.policy.draft_trees import grow_trees
from verifier_svc.policy.forward_cost import ForwardCost
from verifier_svc.policy.plan import Plan
from verifier_svc.policy.planner import Planner
from verifier_svc.policy.speculation_budget import SpeculationBudget
from verifier_svc.state.scheduled_sequence import ScheduledSequence
from verifier_svc.state.sequence import Sequence
from verifier_svc.state.step_clock import StepClock, StepTimes
from verifier_svc.state.target_device import NO_DEVICE, TargetDevice
from verifier_svc.state.trie import DraftTree
from verifier_svc.verification.batch import DraftVerifier, Verification, Verified
from verifier_svc.verification.grammar_masks import GrammarMasks
from verifier_svc.verification.mask_lanes import Inline, MaskBudget, MaskLanes

log = logging.getLogger(__name__)

_CONFIG = EngineConfig()
_INLINE = Inline()
# While every running sequence waits for slow masks, the engine looks for ready masks at this
# interval (seconds).
_MASK_POLL_S = 0.05


class Engine:
    """Owns every sequence. Other threads may call only `post`, `stop` and `clock`.

    `launches` means that the model's `forward` returns before the device has computed. For
    `target_device`, `sampled_drafts` and `features` see `DraftExchange`. Masks are computed on
    `mask_lanes`, within the budget `mask_seconds` (see `MaskBudget`). `draft_policy` says when the
    planner asks for drafts. The engine and its parts read time only from `clock`.
    """

    def __init__(
        self,
        model: LanguageModel,
        pool: PagePool,
        deliver: Callable[[list[Delivery]], None],
        metrics: VerifierMetrics,
        config: EngineConfig = _CONFIG,
        draft_verifier: Verification | None = None,
        *,
        launches: bool = False,
        sampled_drafts: bool = False,
        draft_policy: DraftPolicy = PAYING_DRAFTS,
        target_device: TargetDevice = NO_DEVICE,
        mask_lanes: MaskLanes = _INLINE,
        mask_seconds: float = math.inf,
        features: FeatureSource | None = None,
        clock: Clock = monotonic,
    ) -> None:
        self.model = model
        self.config = config
        self.pool = pool
        self.clock = clock
        self.sequences: dict[int, Sequence] = {}
        self.cost = ForwardCost()
        self.scheduler = Scheduler(pool, config, model.vocab_size, self.cost)
        self.isolated_cost = ForwardCost()  # it learns only from trial forwards
        budget = SpeculationBudget(self.isolated_cost)
        policy = config.draft_tokens_policy
        trees = config.draft_trees
        self.planner = Planner(policy, self.cost, budget, draft_policy, trees=trees)
        self.drafting = DraftExchange(
            self.sequences,
            self.planner,
            metrics,
            sampled_drafts=sampled_drafts,
            target_device=target_device,
            features=features,
            clock=clock,
        )
        self.drafting.roster.max_drafters = config.max_drafters
        self.outbox = Outbox(deliver, self.drafting)
        unread = self.scheduler.unread
        self._book = SequenceBook(self.outbox, clock, config.max_waiting, unread)
        self._metrics = metrics
        verifier = draft_verifier or DraftVerifier()
        self._draft_verifier = verifier
        self._launches = launches
        self._spans = StepSpans(metrics, clock)
        self._step_clock = StepClock(clock)
        self._inbox = Inbox()
        budget_of_masks = MaskBudget(mask_seconds, clock)
        self._grammar_masks = GrammarMasks(mask_lanes, budget_of_masks, self._wake)
        shared = EngineContext(
            self.sequences,
            self.scheduler,
            self.drafting,
            self.outbox,
            self._book,
            metrics,
            clock,
        )
        self._intake = Intake(shared, model, config, verifier.thinking_ids)
        self._wait = DraftWait(
            self.scheduler,
            self.drafting,
            self.outbox,
            self._intake.admit,
            self.planner,
            self._step_clock,
            clock,
        )
        self._endings = Endings(shared)
        self._committer = Committer(shared, self._endings, self._spans, model.eos_token_ids)
        self._left_out = False  # whether a sequence has to repeat its part of the step in progress
        self._baseline = False  # true if no drafter computes during the step in progress

    # --- from other threads ---

    def post(self, work: Callable[[], object]) -> None:
        """Have the engine's thread run `work` between two steps."""
        self._inbox.post(work)

    def stop(self) -> None:
        """Make `run` return after the step in progress and the work posted so far."""
        self._inbox.stop()

    # --- requests ---

    def warm_up(self, context: int = 0) -> None:
        """Measure forwards at a length of `context` tokens, so that the first plan knows costs.

        Call it only before the first request, because it overwrites pages.
        """
        trials = WarmUp(self.model, self.pool, self.config, context, self.clock)
        trials.calibrate(self.cost, self.isolated_cost)

    def submit(
        self,
        request: TokenRequest,
        sink: Callable[[TokenChunk | OutriderError], None],
        span: Span = NO_SPAN,
        matcher: Matcher | None = None,
    ) -> Sequence:
        """Queue a request, with its grammar's state; its chunks, and any error, go to `sink`.

        Raises OutriderError: CONTEXT_LENGTH_EXCEEDED if the request can never fit the cache,
        OVERLOADED if the queue is full, DRAFTER_NOT_FOUND if it names an unknown drafter,
        INVALID_VALUE if it wants relaxed acceptance and the model has no thinking phase, or if its
        committed tokens hold an end token.
        """
        return self._intake.submit(request, sink, span, matcher)

    def load(self) -> Load:
        """Return how busy the engine is."""
        scheduler = self.scheduler
        return replace(scheduler.load_meter.load(), kv_cache_usage=scheduler.pool.usage)

    def cancel(self, sequence: Sequence) -> None:
        """End a sequence without a message to its client, and free its pages."""
        if sequence.id in self.sequences:
            self._endings.end(sequence)
            self._metrics.occupancy(self.scheduler.occupancy())

    def pause(self, sequence: Sequence) -> None:
        """Leave a sequence out of steps until `resume`, because its caller does not read.

        The sequence's drafters are told that the sequence is over, so that they draft for other
        sequences. The text stays the same: its tokens are computed anew later, as after a
        preemption. If more than `max_waiting` sequences are unread, the tenant with the most unread
        sequences loses the sequence that has been unread longest: it ends with SLOW_READER.
        """
        book = self._book
        if sequence.id not in self.sequences or sequence.id in book.unread:
            return
        self.scheduler.remove(sequence)
        self.drafting.close(sequence)
        overdue = book.pause(sequence)
        if overdue is not None:
            self._endings.fail(overdue, book.slow_reader)
        self._metrics.occupancy(self.scheduler.occupancy())

    def resume(self, sequence: Sequence) -> None:
        """Put a paused sequence back among the waiting sequences, under a new id."""
        former_id = sequence.id
        if not self._book.resume(sequence):
            return
        del self.sequences[former_id]
        self.sequences[sequence.id] = sequence
        self.scheduler.waiting.put_back(sequence)
        self._metrics.occupancy(self.scheduler.occupancy())

    def stop_coalescing(self) -> None:
        """Send clients all unsent tokens, and from now on the tokens of each step."""
        self._book.stop_coalescing(self.sequences.values())

    # --- the loop ---

    def run(self) -> None:
        """Advance until stopped; sleep while there is nothing to do."""
        try:
            while not self._inbox.stopped:
                self._inbox.wait(self.advance())
        finally:
            # Clients get all committed tokens, even if an error ended the loop.
            self.outbox.send_to_clients()

    def advance(self) -> float | None:
        """Run posted work, then at most one step; return how long the caller may sleep afterwards.

        0.0 means not at all. While the engine waits for drafts or masks, a positive number limits
        the sleep (seconds). None means that there is no limit. Posted work ends the sleep.
        """
        self.drain_inbox()
        if not self.scheduler.has_work:
            self._wait.cancel()
            self._end_overdue()
            self._go_idle()
            return None
        wait_s = self._wait.poll()
        if wait_s > 0.0:
            return wait_s
        self._end_overdue()
        if self.scheduler.running and not self.scheduler.ready():
            self.outbox.send_to_clients()
            return _MASK_POLL_S
        self.step()
        return 0.0

    def _wake(self) -> None:
        """Wake the thread so that it calls `advance` soon. Any thread may call this."""
        self._inbox.post(_only_wake)

    def _end_overdue(self) -> None:
        """End the sequences whose masks have used up their budget, or failed."""
        unread = self.scheduler.unread.values()
        for sequence in [*self.scheduler.running.values(), *unread]:
            if sequence.mask_work is not None:
                error = self._grammar_masks.error(sequence)
                if error is not None:
                    self._endings.fail(sequence, error)

    def drain_inbox(self) -> None:
        """Run all posted work, and send drafters the messages that result."""
        self._inbox.run_all()
        if not (self._launches and self.scheduler.has_work):
            self._metrics.flush()
        self.outbox.send_to_drafters()

    def _go_idle(self) -> None:
        """Deliver the last chunks, and check the page pool once per idle period."""
        self.outbox.send_to_clients()
        if not self._step_clock.idle():
            return
        try:
            self.pool.check_integrity()
        except RuntimeError as error:
            log.error("the page pool of the idle engine is inconsistent: %s", error)
            self._metrics.integrity_failed()

    # --- a step ---

    def step(self) -> None:
        """Choose a batch, verify its drafts with one forward, and commit what the target agrees to.

        Clients get the previous step's tokens when the forward begins. Drafters get this step's
        verdicts at its end.
        """
        batch = self._next()
        if batch:
            spans = self._spans.begin(batch, self._step_clock.wait_s)
            verified = self._verify(batch)
            self._commit(batch, verified, spans)
            self._end_step(batch)

    def _next(self) -> list[ScheduledSequence]:
        """Begin a step: choose the tokens and drafts of the next forward by the plan."""
        self._step_clock.begin()
        self._baseline = self._step_clock.undisturbed_since(self.drafting.busy_until)
        plan = self._wait.take_plan()
        self.outbox.send_to_drafters()
        scheduler = self.scheduler
        trees = grow_trees(scheduler.in_turn, plan, scheduler.draft_room)
        batch = self._grammar_masks.cut(scheduler.next(plan.draft_tokens, trees))
        self._step_clock.end("pack")
        if not (self._launches and batch):
            self.outbox.send_to_clients()
        self._step_clock.end("send")
        return batch

    def _verify(self, batch: list[ScheduledSequence]) -> list[Verified | OutriderError | None]:
        """Run the forward and verify the drafts; if that fails, every sequence gets the error.

        A sequence whose masks are late, or whose draft spoilt its logits, gets None: its part of
        the step has to be repeated.

        Raises torch.AcceleratorError if the device failed.
        """
        clock = self._step_clock
        try:
            slices = [_slice(scheduled) for scheduled in batch]
            masked = self._grammar_masks.masks(batch)
            clock.end("pack")
            logits_RV = self.model.forward(slices)
            clock.end("forward")
            # A GPU computes meanwhile; the copy of the layout waits in its queue.
            verify = self._draft_verifier.lay_out(batch)
            clock.end("pack")
            if self._launches:
                self.outbox.send_to_clients()
                self._metrics.flush()
                clock.end("send")
                self._wait.outline()
                clock.end("pack")
            found = verify(logits_RV, masked())
            clock.end("accept")
        except torch.AcceleratorError:
            raise  # the device is lost for this process; its supervisor restarts it
        except (RuntimeError, OutriderError) as error:
            log.exception("a forward failed", extra={"traceparent": self._spans.traceparent})
            if not isinstance(error, OutriderError):
                error = OutriderError(Reason.INTERNAL, "the target's forward failed")
            return [error] * len(batch)
        for scheduled, each in zip(batch, found, strict=True):
            if isinstance(each, OutriderError) and _may_succeed_without_draft(
                each, scheduled.draft
            ):
                self._repeat_without_draft(scheduled)
        pairs = zip(batch, found, strict=True)
        return [None if scheduled.is_late else each for scheduled, each in pairs]

    def _repeat_without_draft(self, scheduled: ScheduledSequence) -> None:
        """Have a sequence's part of the step repeated without its draft, and stop drafting for it.

        Perhaps only a draft token makes the model overflow. The attention mask does not protect the
        tokens before the draft token, because 0 * NaN is NaN. But a guess must not end a sequence.
        """
        scheduled.is_late = scheduled.is_spoilt = True
        scheduled.sequence.max_draft_tokens = 0
        self.drafting.close(scheduled.sequence)

    def _commit(
        self,
        batch: list[ScheduledSequence],
        found: list[Verified | OutriderError | None],
        spans: list[Span],
    ) -> None:
        self._left_out = sum([result is None for result in found]) > 0
        sources, targets = moved_slots(batch, found, self.pool.page_size)
        if sources:
            self.model.move_tokens(sources, targets)
        self.drafting.features.take(batch, found)
        self.drafting.note_pauses(
            [
                scheduled.sequence
                for scheduled, each in zip(batch, found, strict=True)
                if not scheduled.draft.token_ids and isinstance(each, Verified) and each.result
            ]
        )
        for scheduled, result, span in zip(batch, found, spans, strict=True):
            self._committer.commit(scheduled, result, span)
        committed = [scheduled.sequence for scheduled in batch if not scheduled.is_late]
        self._grammar_masks.prepare([each for each in committed if each.id in self.sequences])
        self._step_clock.end("commit")

    def _end_step(self, batch: list[ScheduledSequence]) -> None:
        """Send verdicts and measure the step; after the last step, send chunks and counts too."""
        clock = self._step_clock
        self.outbox.send_to_drafters()
        clock.end("send")
        goes_on = self._launches and self.scheduler.has_work
        if not goes_on:
            self.outbox.catch_up()
            clock.end("commit")
        since_last_s = clock.end_step()
        times = clock.times()
        self.scheduler.charge(batch, times.step_s, self.clock())
        self._spans.end(times.phases_s)
        # Steps that wait for masks take longer than their forwards.
        is_typical = "accept" in times.phases_s and not self._left_out
        plan, baseline = self.drafting.plan, self._baseline
        committed = self._committer.take_token_count()
        observe = partial(
            self._observe, batch, times, since_last_s, committed, plan, is_typical, baseline
        )
        if goes_on:
            self.outbox.later(observe)
            return
        observe()
        if not self.scheduler.has_work:
            self._metrics.flush()
            self.outbox.send_to_clients()

    def _observe(
        self,
        batch: list[ScheduledSequence],
        times: StepTimes,
        since_last_s: float,
        committed: int,
        plan: Plan,
        is_typical: bool,
        baseline: bool,
    ) -> None:
        """Export a step that followed `plan`, and update the cost model with its duration.

        `since_last_s` is the time from the end of the previous step to the end of this step. The
        metrics get the seconds of the same forward on an idle machine; 0 if the step held prompts
        or was not typical, or if no trial forward has run. Steps that are not typical update no
        cost, and neither do steps that score a prompt, because ordinary steps do not pay that cost.
        """
        isolated_forward_s = 0.0
        scored = [scheduled for scheduled in batch if scheduled.scored]
        if is_typical and not scored:
            decoding = [len(scheduled.draft.token_ids) for scheduled in batch if scheduled.samples]
            token_count = len(decoding) + sum(decoding)
            prompt_tokens = sum([len(scheduled.token_ids) for scheduled in batch]) - len(decoding)
            self.cost.observe(len(decoding), token_count, times.step_s, prompt_tokens)
            if prompt_tokens <= 0:
                if since_last_s < math.inf and not plan.always_draft_requested:
                    self.planner.budget.observe(
                        len(batch),
                        plan.paying,
                        committed,
                        since_last_s,
                        baseline=baseline and token_count == len(batch),
                    )
                isolated_forward_s = self.isolated_cost.estimate(len(batch), token_count)
        self._metrics.occupancy(self.scheduler.occupancy())
        self._metrics.step(times, isolated_forward_s, len(batch))


def _may_succeed_without_draft(error: OutriderError, draft: DraftTree) -> bool:
    """Return whether a failed step may be repeated without its draft, and may then succeed.

    A sampled draft must stay: dropping a sampled token because of its value would bias the token
    that is drawn instead.
    """
    if error.reason is not Reason.LOGITS_NOT_FINITE:
        return False
    return bool(draft.token_ids) and not draft.distributions


def _only_wake() -> None:
    """Do nothing: posting this only wakes the engine."""


def _slice(scheduled: ScheduledSequence) -> SequenceSlice:
    draft = scheduled.draft
    tokens = scheduled.token_ids + draft.token_ids
    kv = scheduled.sequence.kv
    count = scheduled.logit_count
    return SequenceSlice(tokens, scheduled.start, kv.pages, count, draft.parents, kv)
