"""The engine: a step chooses a batch, verifies its drafts, and commits what the target agrees to.

It runs on a thread of its own, to which other threads only `post` work. Its messages leave through
sinks: those to drafters after each step, those to clients when the next forward begins. Knows token
ids and drafters; not text, protobuf or grpc.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

import torch

from outrider.clock import Clock, monotonic
from outrider.errors import OutriderError, Reason
from outrider.grammar.backends import Compiled
from outrider.lm.pages import PagePool
from outrider.lm.runner import SequenceSlice
from outrider.messages import TokenChunk, TokenRequest
from outrider.process.telemetry import NO_SPAN, Span
from verifier_svc.drafts.exchange import DraftExchange
from verifier_svc.engine.admission import Admission
from verifier_svc.engine.commit import Committer
from verifier_svc.engine.inbox import Inbox
from verifier_svc.engine.outgoing import Delivery, Outgoing
from verifier_svc.engine.scheduler import Scheduler
from verifier_svc.engine.step_spans import StepSpans
from verifier_svc.engine.target import LanguageModel, Limits
from verifier_svc.engine.waiting import DraftWait
from verifier_svc.engine.warm_up import WarmUp
from verifier_svc.metrics import Metrics
from verifier_svc.policy.forward_cost import ForwardCost
from verifier_svc.policy.planner import Planner
from verifier_svc.policy.speculation_budget import SpeculationBudget
from verifier_svc.state.scheduled_sequence import ScheduledSequence
from verifier_svc.state.sequence import Sequence
from verifier_svc.state.step_clock import StepClock
from verifier_svc.verification.batch import DraftVerifier, Verification, Verified
from verifier_svc.verification.grammar_masks import GrammarMasks

log = logging.getLogger(__name__)

_LIMITS = Limits()
_EXACT = DraftVerifier()


class Engine:
    """Owns every sequence. All but `post` and `stop` is for the engine's own thread."""

    def __init__(
        self,
        model: LanguageModel,
        pool: PagePool,
        deliver: Callable[[list[Delivery]], None],
        metrics: Metrics,
        limits: Limits = _LIMITS,
        draft_verifier: Verification = _EXACT,
        *,
        trust_draft_distributions: bool = False,
        always_draft: bool = False,
        own_cores: frozenset[int] | None = None,
        traced_steps: float = 1.0,
        clock: Clock = monotonic,
    ) -> None:
        """`own_cores` as in `DraftExchange`; a share `traced_steps` of traced steps has spans.

        The engine and all its parts read time from `clock` alone.
        """
        self.model = model
        self.limits = limits
        self.pool = pool
        self.clock = clock
        self.sequences: dict[int, Sequence] = {}
        self.scheduler = Scheduler(
            pool,
            max_batch_tokens=limits.max_batch_tokens,
            max_sequences=limits.max_sequences,
            max_scored_tokens=max(1, limits.scored_logits_bytes // (4 * model.vocab_size)),
        )
        self.cost = ForwardCost()
        self.isolated_cost = ForwardCost()
        """As `cost`, but as trial forwards left it: the cost of a forward that nothing disturbs."""
        self.budget = SpeculationBudget(self.isolated_cost)
        self.planner = Planner(limits.depth, self.cost, self.budget, always=always_draft)
        self.drafting = DraftExchange(
            self.sequences,
            self.planner,
            metrics,
            trust_distributions=trust_draft_distributions,
            own_cores=own_cores,
            clock=clock,
        )
        self.drafting.roster.max_drafters = limits.max_drafters
        self.outgoing = Outgoing(deliver, self.drafting)
        """Messages that were not delivered yet."""
        self._metrics = metrics
        self._draft_verifier = draft_verifier
        self._grammar_masks = GrammarMasks()
        self._spans = StepSpans(metrics, traced_steps, clock)
        self._step_clock = StepClock(clock)
        self._inbox = Inbox()
        has_thinking = draft_verifier.thinking_ids is not None
        self._admission = Admission(
            model,
            limits,
            self.scheduler,
            self.drafting,
            self.sequences,
            clock,
            has_thinking=has_thinking,
        )
        self._wait = DraftWait(
            self.planner,
            self._admission,
            self.scheduler,
            self.drafting,
            self.outgoing,
            self._step_clock,
            clock,
        )
        self._committer = Committer(
            self.sequences,
            self.scheduler,
            self.drafting,
            self.outgoing,
            self._spans,
            metrics,
        )
        self._idle = True
        # Whether no drafter computes during the step in progress.
        self._quiet = False

    # --- from other threads ---

    def post(self, work: Callable[[], object]) -> None:
        """Have `work` run on the engine's thread, between two steps."""
        self._inbox.post(work)

    def stop(self) -> None:
        """Let `run` return after the step in progress and what was posted before."""
        self._inbox.stop()

    # --- requests ---

    def warm_up(self, context: int = 0) -> None:
        """Run trial forwards of sequences of `context` tokens: costs are known from the start.

        Only before the first request, since pages are overwritten.
        """
        trials = WarmUp(self.model, self.pool, self.limits, context, self.clock)
        trials.calibrate(self.cost, self.isolated_cost)

    def submit(
        self,
        request: TokenRequest,
        sink: Callable[[TokenChunk | OutriderError], None],
        span: Span = NO_SPAN,
        grammar: Compiled | None = None,
    ) -> Sequence:
        """Take a request, with its grammar compiled; its chunks, or an error, go to `sink`.

        Raises OutriderError: CONTEXT_LENGTH_EXCEEDED when it could never fit the cache, OVERLOADED
        when too many wait, DRAFTER_NOT_FOUND for a drafter nobody knows, INVALID_VALUE for relaxed
        acceptance with a model that does not think.
        """
        return self._admission.submit(request, sink, span, grammar)

    def cancel(self, sequence: Sequence) -> None:
        """Free a sequence that nobody waits for any more."""
        if sequence.id in self.sequences:
            self._committer.close(sequence)
            self._metrics.occupancy(self.scheduler)

    # --- the loop ---

    def run(self) -> None:
        """Advance until stopped, and sleep in between for as long as there is nothing to do."""
        try:
            while not self._inbox.stopped:
                self._inbox.wait(self.advance())
        finally:
            # Whatever ended the loop, clients are told what was committed.
            self.outgoing.tell_clients()

    def advance(self) -> float | None:
        """Do what is due, at most one step of it; returns how long the caller may sleep afterwards.

        0.0 is not at all; a positive number is at most so many seconds, while the engine waits for
        drafts; None is without limit. Whatever is posted ends the sleep.
        """
        self.drain_inbox()
        if not self.sequences:
            self._wait.cancel()
            self._go_idle()
            return None
        wait_s = self._wait.remaining_s()
        if wait_s > 0.0:
            return wait_s
        self._idle = False
        self.step()
        return 0.0

    def drain_inbox(self) -> None:
        """Run everything that was posted."""
        self._inbox.run_all()
        self._metrics.flush()
        self.outgoing.tell_drafters()

    def _go_idle(self) -> None:
        """Deliver what is left; look for lost pages once in an idle period, when nobody waits."""
        self.outgoing.tell_clients()
        self._step_clock.idle()
        if self._idle:
            return
        self._idle = True
        try:
            self.pool.check_integrity()
        except RuntimeError as error:
            log.error("the page pool of the idle engine is inconsistent: %s", error)
            self._metrics.integrity_failed()

    # --- a step ---

    def step(self) -> None:
        """Choose a batch, verify its drafts with one forward, and commit what the target agrees to.

        Clients hear of the previous step when the forward begins, drafters of this one at its end.
        """
        batch = self._next()
        if batch:
            spans = self._spans.begin(batch, self._step_clock.wait_s)
            verified = self._verify(batch)
            self._commit(batch, verified, spans)
            self._end_step(batch)

    def _next(self) -> list[ScheduledSequence]:
        """Begin a step: choose the tokens and drafts of the next forward, as planned."""
        self._step_clock.begin()
        self._quiet = self._step_clock.undisturbed_since(self.drafting.busy_until)
        plan = self._wait.take_plan()
        self.outgoing.tell_drafters()
        batch = self._grammar_masks.cut(self.scheduler.next(plan.draft_tokens))
        self._step_clock.end("pack")
        self.outgoing.tell_clients()
        self._step_clock.end("send")
        return batch

    def _verify(self, batch: list[ScheduledSequence]) -> list[Verified | OutriderError]:
        """Run the forward and verify the drafts; if that fails, each sequence gets the error."""
        clock = self._step_clock
        try:
            slices = [_slice(scheduled) for scheduled in batch]
            masked = self._grammar_masks.masks(batch)
            clock.end("pack")
            logits_RV = self.model.forward(slices)
            clock.end("forward")
            verified = self._draft_verifier.verify(logits_RV, masked())
            clock.end("accept")
        except torch.AcceleratorError:
            raise  # the device is lost to this process, which its supervisor starts anew
        except (RuntimeError, OutriderError) as error:
            log.exception("a forward failed", extra={"traceparent": self._spans.traceparent})
            if not isinstance(error, OutriderError):
                error = OutriderError(Reason.INTERNAL, "the target's forward failed")
            return [error] * len(batch)
        return verified

    def _commit(
        self,
        batch: list[ScheduledSequence],
        verified: list[Verified | OutriderError],
        spans: list[Span],
    ) -> None:
        for scheduled, found, span in zip(batch, verified, spans, strict=True):
            self._committer.commit(scheduled, found, span)
        self._step_clock.end("commit")

    def _end_step(self, batch: list[ScheduledSequence]) -> None:
        """Learn what the step cost and tell drafters of it, and clients if no sequence is left."""
        isolated_forward_s = self._observe(batch)
        self._metrics.occupancy(self.scheduler)
        self._metrics.flush()
        self.outgoing.tell_drafters()
        if not self.sequences:
            self.outgoing.tell_clients()
        self._step_clock.end("send")
        self._spans.end(self._step_clock.phases_s)
        self._metrics.step(self._step_clock, isolated_forward_s, len(batch))

    def _observe(self, batch: list[ScheduledSequence]) -> float:
        """Update the cost model with this step's duration; notifying drafters is not part of it.

        Returns the seconds that its forward takes on an idle machine; 0 when it holds prompts, or
        before trial forwards. A step that scores a prompt is skipped, since ordinary steps do not
        pay that cost, and so is one that failed.
        """
        seconds, committed = self._step_clock.end_step(), self._committer.take_token_count()
        failed = "accept" not in self._step_clock.phases_s
        if failed or any(scheduled.scored for scheduled in batch):
            return 0.0
        decoding = [len(scheduled.path.token_ids) for scheduled in batch if scheduled.samples]
        token_count = len(decoding) + sum(decoding)
        prompt_token_count = sum([len(scheduled.token_ids) for scheduled in batch]) - len(decoding)
        self.cost.observe(len(decoding), token_count, self._step_clock.step_s, prompt_token_count)
        if prompt_token_count > 0:
            return 0.0
        if seconds < math.inf:
            self.budget.observe(
                len(batch),
                self.drafting.plan.paying,
                committed,
                seconds,
                quiet=self._quiet and token_count == len(batch),
            )
        return self.isolated_cost.estimate(len(batch), token_count)


def _slice(scheduled: ScheduledSequence) -> SequenceSlice:
    tokens = scheduled.token_ids + scheduled.path.token_ids
    return SequenceSlice(
        tokens, scheduled.start, scheduled.sequence.kv.pages, scheduled.logit_count
    )
