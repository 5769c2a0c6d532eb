"""The engine: a step is `items = scheduler.next()`, `model.forward(...)`, `judge.judge(...)`, and a commit of each item.

It runs on a thread of its own. Other threads only `post` work to it; what it has to say leaves through sinks, those of drafters
after each step and those of clients when the next forward begins. Knows token ids and drafters; not text, protobuf or grpc.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Protocol

import torch

from outrider.clock import Clock, monotonic
from outrider.depth_policy import DepthPolicy
from outrider.errors import OutriderError, Reason
from outrider.grammar_backends import Compiled
from outrider.lm.pages import KVSequence, PagePool
from outrider.lm.runner import Slice
from outrider.messages import Acceptance, FinishReason, SpeculationStats, TokenChunk, TokenLogprob, TokenRequest
from outrider.telemetry import NO_SPAN, Span
from verifier_svc.chunks import chunk_of, end
from verifier_svc.depth import ForwardCost
from verifier_svc.drafting import Drafting
from verifier_svc.guidance import Guidance
from verifier_svc.inbox import Inbox
from verifier_svc.judging import Judge, Judgement, why_impossible
from verifier_svc.logprobs import split_scored
from verifier_svc.metrics import Metrics
from verifier_svc.outgoing import Delivery, Outgoing
from verifier_svc.planning import Planner
from verifier_svc.scheduler import Item, Scheduler
from verifier_svc.sequence import Sequence
from verifier_svc.step_clock import StepClock
from verifier_svc.step_spans import StepSpans
from verifier_svc.waiting import DraftWait

log = logging.getLogger(__name__)

_EXACT = Judge()
# Trial forwards end after about so long, before the larger batches of a large model.
_WARM_UP_S = 5.0
# Tokens of the prompt that is tried.
_TRIAL_PROMPT = 256


class LanguageModel(Protocol):
    """What the engine needs of a model; `outrider.lm.runner.ModelRunner` is one."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]

    def forward(self, slices: SequenceOf[Slice]) -> torch.Tensor:
        """Float32 logits [R, V] for the last `logit_count` tokens of each slice, in order."""


@dataclass(frozen=True, slots=True)
class Limits:
    """`depth`: draft tokens of a sequence verified in one step, unless its request says otherwise; the rest are counts.

    `scored_logits_bytes` bounds the logits that a step computes for prompts whose log probabilities are wanted.
    """

    depth: DepthPolicy = field(default_factory=lambda: DepthPolicy("fixed", 4))
    max_batch_tokens: int = 512
    max_sequences: int = 64
    max_waiting: int = 1024
    max_drafters: int = 64
    scored_logits_bytes: int = 2**28


class Engine:
    """Owns every sequence. All but `post` and `stop` is for the engine's own thread."""

    def __init__(
        self,
        model: LanguageModel,
        pool: PagePool,
        deliver: Callable[[list[Delivery]], None],
        metrics: Metrics,
        limits: Limits = Limits(),  # frozen
        judge: Judge = _EXACT,
        *,
        trust_draft_distributions: bool = False,
        always_draft: bool = False,
        own_cores: frozenset[int] | None = None,
        traced_steps: float = 1.0,
        clock: Clock = monotonic,
    ) -> None:
        """`own_cores` as in `Drafting`, `traced_steps` is the share of a traced request's steps that have spans.

        The engine and all its parts read time from `clock` alone.
        """
        self.model = model
        self.limits = limits
        self.judge = judge
        self.pool = pool
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
        self.planner = Planner(limits.depth, self.cost, always=always_draft)
        self.drafting = Drafting(
            self.sequences, self.planner, metrics, trust_distributions=trust_draft_distributions, own_cores=own_cores, clock=clock
        )
        self.drafting.roster.max_drafters = limits.max_drafters
        self._spans = StepSpans(metrics, traced_steps, clock)
        self._guidance = Guidance()
        self._metrics = metrics
        self.outgoing = Outgoing(deliver, self.drafting)
        """What was not said yet."""
        self._clock = clock
        self._step_clock = StepClock(clock)
        self._wait = DraftWait(self.planner, self.scheduler, self.outgoing, self._step_clock, clock)
        self._inbox = Inbox()
        self._last_id = 0

    # --- from other threads ---

    def post(self, work: Callable[[], object]) -> None:
        """Have `work` run on the engine's thread, between two steps."""
        self._inbox.post(work)

    def stop(self) -> None:
        """Let `run` return after the step in progress and what was posted before."""
        self._inbox.stop()

    def warm_up(self, context: int = 0) -> None:
        """Run forwards of many sizes: the first request does not pay for choosing kernels, and costs are known from the start.

        They are those of sequences of `context` tokens, as far as there are pages for as many. Only before the first request, since
        pages are overwritten.
        """
        limits, pool = self.limits, self.pool
        end = self._clock() + _WARM_UP_S
        self._try_batch(1, context)
        longest = min(_TRIAL_PROMPT, context, limits.max_batch_tokens, pool.page_count * pool.page_size)
        if longest > 3 and self._clock() < end:
            short, long = ((count, self._trial_s(1, count, 0, 1)) for count in (longest // 4, longest))
            self.cost.calibrate_prompts(short, long)
        # The largest first, in case there is not the time for those between.
        for batch in dict.fromkeys([limits.max_sequences, *(2**i for i in range(3, limits.max_sequences.bit_length()))]):
            if batch > 1 and self._clock() < end:
                self._try_batch(batch, context)

    def _try_batch(self, batch: int, context: int) -> None:
        """Note what forwards of so many sequences take, up to the depth that may be drafted."""
        limits, pool, deepest = self.limits, self.pool, self.limits.depth.depth
        for count in sorted({1, 2, 1 + deepest // 2, 1 + deepest}):
            pages = batch * -(-count // pool.page_size)
            if batch * count <= limits.max_batch_tokens and pages <= pool.page_count:
                seconds = self._trial_s(batch, count, context)
                for cost in (self.cost, self.isolated_cost):
                    cost.calibrate(batch, batch * count, seconds)

    def _trial_s(self, batch: int, count: int, context: int, logit_count: int = 0) -> float:
        """Seconds of a forward of so many sequences with so many tokens each, the better of two, behind zeros; the last
        `logit_count` of each are scored, or all.
        """
        size = self.pool.page_size
        length = max(min(context, self.pool.page_count // batch * size), count)
        each = -(-length // size)
        slices = [
            Slice([0] * count, length - count, list(range(i * each, (i + 1) * each)), logit_count or count) for i in range(batch)
        ]
        times = []
        for _ in range(2):
            started = self._clock()
            # Reading a value back waits for a device that works on its own.
            self.model.forward(slices)[0, 0].item()
            times.append(self._clock() - started)
        return min(times)

    # --- the loop ---

    def run(self) -> None:
        """Advance until stopped, and sleep in between for as long as there is nothing to do."""
        try:
            while not self._inbox.stopped:
                self._inbox.wait(self.advance())
        finally:
            # What was committed is told, whatever ended the loop.
            self.outgoing.tell_clients()

    def advance(self) -> float | None:
        """Do what is to be done now, at most one step of it, and return how long the caller may sleep before the next call.

        0.0 is not at all, and a positive number at most so many seconds, while drafts are waited for; None is as long as nothing
        is posted. The caller ends a sleep early when something is posted.
        """
        self.drain_inbox()
        wait_s = self._wait.remaining_s()
        if wait_s > 0.0:
            return wait_s
        if not self.sequences:
            self.outgoing.tell_clients()
            return None
        self.step()
        return 0.0

    def drain_inbox(self) -> None:
        """Run everything that was posted."""
        self._inbox.run_all()
        self._metrics.flush()
        self.outgoing.tell_drafters()

    def step(self) -> None:
        """Tell clients of the step before, then one forward and what it commits, of which drafters are told at once.

        So are clients if there is nobody left to compute for.
        """
        clock, preempted = self._step_clock, self.scheduler.preemption_count
        clock.begin()
        self._admit()
        self.outgoing.tell_drafters()
        items = self._guidance.cut(self.scheduler.next())
        clock.end("pack")
        self.outgoing.tell_clients()
        clock.end("send")
        if not items:
            return
        spans = self._spans.begin(items, clock.wait_s)
        isolated_forward_s = 0.0
        try:
            judgements, scores = self._forward(items)
        except torch.AcceleratorError:
            raise  # the device will do nothing more for this process, which whoever supervises it starts anew
        except (RuntimeError, OutriderError) as error:
            traced = next((span.traceparent for span in spans if span.traceparent), "")
            log.exception("a forward failed", extra={"traceparent": traced})
            self._fail(items, error)
        else:
            for item, judgement, scored, span in zip(items, judgements, scores, spans, strict=True):
                if (reason := why_impossible(judgement, scored)) is not None:
                    self._fail([item], reason)
                else:
                    self._commit(item, judgement, scored, span)
            clock.end("commit")
            isolated_forward_s = self._observe(items)
        self._spans.end()
        self._measure_occupancy()
        self._metrics.flush()
        self.outgoing.tell_drafters()
        if not self.sequences:
            self.outgoing.tell_clients()
        clock.end("send")
        self._metrics.step(clock, isolated_forward_s, self.scheduler.preemption_count - preempted, len(items))

    def _forward(self, items: list[Item]) -> tuple[list[Judgement | None], list[list[TokenLogprob]]]:
        """Score a batch: a judgement for each item, None for a part of a prompt, and the log probabilities of `Item.scored`."""
        clock = self._step_clock
        slices = [_slice(item) for item in items]
        masked = self._guidance.masks(items)
        clock.end("pack")
        logits_RV = self.model.forward(slices)
        clock.end("forward")
        logits_RV, scores = split_scored(logits_RV, items)
        judgements = self.judge.judge(logits_RV, masked())
        clock.end("accept")
        return judgements, scores

    def _observe(self, items: list[Item]) -> float:
        """Update the cost model with this step's duration, host time included (notifying drafters, which is little, is not).

        Returns what the step's forward takes on an idle machine, in seconds; 0 when it holds prompts or before trial forwards.
        Steps that score a prompt are skipped, since ordinary steps do not pay that cost.
        """
        if any(item.scored for item in items):
            return 0.0
        decoding = [len(item.path.token_ids) for item in items if item.samples]
        token_count = len(decoding) + sum(decoding)
        prompt_token_count = sum([len(item.token_ids) for item in items]) - len(decoding)
        self.cost.observe(len(decoding), token_count, self._step_clock.step_s, prompt_token_count)
        return self.isolated_cost.estimate(len(items), token_count) if prompt_token_count == 0 else 0.0

    # --- requests ---

    def submit(
        self,
        request: TokenRequest,
        sink: Callable[[TokenChunk | OutriderError], None],
        span: Span = NO_SPAN,
        grammar: Compiled | None = None,
    ) -> Sequence:
        """Take a request, with its grammar compiled; its chunks and, at worst, an error go to `sink`.

        Raises OutriderError: CONTEXT_LENGTH_EXCEEDED when it could never fit the cache, OVERLOADED when too many wait,
        DRAFTER_NOT_FOUND for a drafter nobody knows, INVALID_VALUE for relaxed acceptance with a model that does not think.
        """
        needed, held = len(request.prompt) + request.max_tokens, self.pool.page_count * self.pool.page_size
        if needed > held:
            message = f"max_tokens: prompt and max_tokens make {needed} tokens, but the KV cache holds {held}"
            raise OutriderError(Reason.CONTEXT_LENGTH_EXCEEDED, message, "max_tokens")
        if len(self.scheduler.waiting) >= self.limits.max_waiting:
            raise OutriderError(Reason.OVERLOADED, f"{self.limits.max_waiting} requests are waiting already", retry_after_s=1.0)
        if request.speculation.acceptance is Acceptance.RELAXED and self.judge.thinking_ids is None:
            message = "speculation.acceptance: relaxed is for the thinking phase, and this model has no tokens that mark one"
            raise OutriderError(Reason.INVALID_VALUE, message, "speculation.acceptance")
        if request.speculation.enabled:
            self.drafting.roster.check_known(request.speculation.drafter)
        sequence = self._new_sequence(request, sink, span)
        if grammar is not None:
            sequence.matcher, sequence.mask_width = grammar.matcher(), -(-self.model.vocab_size // 32)
        self.sequences[sequence.id] = sequence
        self.scheduler.add(sequence)
        self._admit()
        return sequence

    def _admit(self) -> None:
        for sequence in self.scheduler.admit():
            self.drafting.hand_out(sequence)

    def _new_sequence(self, request: TokenRequest, sink: Callable[[TokenChunk | OutriderError], None], span: Span) -> Sequence:
        self._last_id += 1
        depth = self.limits.depth.depth if request.speculation.depth is None else request.speculation.depth
        # Of a single token none can be drafted, since the last one is always the target's own.
        depth = depth if request.speculation.enabled and request.max_tokens > 1 else 0
        return Sequence(
            id=self._last_id,
            request=request,
            seed=secrets.randbits(64) if request.sampling.seed is None else request.sampling.seed,
            depth_limit=depth,
            end_ids=request.stop_token_ids | frozenset(() if request.ignore_eos else self.model.eos_token_ids),
            kv=KVSequence(),
            sink=sink,
            tokens=list(request.prompt),
            stats=SpeculationStats(max_depth=depth),
            # Nothing precedes the first token that could tell how likely it is.
            unscored=range(0) if request.prompt_logprobs is None else range(1, len(request.prompt)),
            span=span,
            submitted_at=self._clock(),
        )

    def cancel(self, sequence: Sequence) -> None:
        """Free a sequence that nobody waits for any more."""
        if sequence.id in self.sequences:
            self._close(sequence)
            self._measure_occupancy()

    def _measure_occupancy(self) -> None:
        scheduler, pool = self.scheduler, self.pool
        page_share = pool.used_count / pool.page_count
        self._metrics.occupancy(running=len(scheduler.running), waiting=len(scheduler.waiting), page_share=page_share)
        self._metrics.prefix_cache(scheduler.prompt_token_count, scheduler.cached_token_count)

    def _close(self, sequence: Sequence) -> None:
        del self.sequences[sequence.id]
        self.scheduler.remove(sequence)
        self.drafting.close(sequence)

    def _fail(self, items: list[Item], error: Exception) -> None:
        """End the sequences of a batch whose forward failed; the others go on."""
        told = error if isinstance(error, OutriderError) else OutriderError(Reason.INTERNAL, "the target's forward failed")
        for item in items:
            self.outgoing.add(item.sequence.sink, told)
            self._close(item.sequence)

    # --- committing ---

    def _commit(self, item: Item, judgement: Judgement | None, scored: list[TokenLogprob], span: Span) -> None:
        """Take over what a forward said about one sequence."""
        sequence = item.sequence
        sequence.kv.length = item.start + len(item.token_ids)
        if scored:
            sequence.unscored = sequence.unscored[len(scored) :]
        if judgement is None:
            self.pool.publish(sequence.kv, sequence.tokens, sequence.request.tenant)
            if scored:
                self.outgoing.add(sequence.sink, TokenChunk([], [], prompt_logprobs=scored))
            return
        outcome, drafted = judgement.outcome, item.path.token_ids
        new = [*drafted[: outcome.accepted_count], outcome.next_token]
        finish_reason = end(sequence, new)
        accepted = min(outcome.accepted_count, len(new))
        if sequence.matcher is not None:
            if not all(sequence.matcher.accept(token) for token in new):
                self._fail([item], OutriderError(Reason.INTERNAL, "a token was sampled that the grammar's mask forbids"))
                return
            # Behind the end of a grammar there is nothing, whatever ignore_eos says.
            finish_reason = FinishReason.STOP if sequence.matcher.ended else finish_reason
        sequence.tokens += new
        sequence.stats.record(len(drafted), accepted, judgement.rule)
        # Keep the cache of what was accepted; the target's own token was sampled, not fed, so it comes with the next forward.
        sequence.kv.length += accepted
        if accepted < len(drafted):
            self.pool.truncate(sequence.kv, sequence.kv.length)
        self.pool.publish(sequence.kv, sequence.tokens, sequence.request.tenant)
        if sequence.stats.forward_count == 1:
            self._spans.prefilled(sequence)
        self._metrics.generated(len(new))
        if span.traceparent:
            span.set(outrider__accepted_tokens=accepted, outrider__committed_tokens=len(new))
        if item.assignment is not None:
            self.drafting.judge(item.assignment, len(drafted), outcome.accepted_count)
        self._emit(sequence, chunk_of(item, new, accepted, judgement, finish_reason, scored))
        if finish_reason is not None:
            self._close(sequence)
        else:
            self.drafting.acknowledge(sequence, new, span)

    def _emit(self, sequence: Sequence, chunk: TokenChunk) -> None:
        """Deliver what was committed, unless the request wants more tokens at once."""
        if sequence.unsent is not None:
            chunk = sequence.unsent.joined(chunk)
        first = sequence.stats.forward_count == 1
        if first or chunk.finish_reason is not None or len(chunk.token_ids) >= sequence.request.min_chunk_tokens:
            self.outgoing.add(sequence.sink, chunk)
            sequence.unsent = None
        else:
            sequence.unsent = chunk


def _slice(item: Item) -> Slice:
    return Slice(item.token_ids + item.path.token_ids, item.start, item.sequence.kv.pages, item.logit_count)
