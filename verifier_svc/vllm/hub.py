"""vLLM's requests as sequences: plans their drafts, waits for them, and judges them.

`verifier_svc/vllm/scheduler.py` calls the hub around vLLM's steps. This module knows token ids, but
not vLLM. vLLM verifies a chain of draft tokens for each request, so a draft is one drafter's main
path.
"""

from __future__ import annotations

import logging
import math
import random
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from outrider.errors import OutriderError, Reason
from outrider.process.clock import Clock, monotonic
from outrider.process.observability.telemetry import Span
from outrider.protocol.draft_tokens_policy import DraftTokensPolicy
from outrider.protocol.messages import AcceptanceRule, TokenChunk, TokenRequest
from outrider.protocol.model_info import Load
from verifier_svc.drafts.draft_message import judge_draft
from verifier_svc.drafts.exchange import DraftExchange
from verifier_svc.engine.draft_wait import DraftWait
from verifier_svc.engine.intake import Inbox, new_sequence
from verifier_svc.engine.load_meter import LoadMeter
from verifier_svc.engine.outbox import Delivery, Outbox
from verifier_svc.engine.sequence_book import SequenceBook
from verifier_svc.engine.step_spans import StepSpans
from verifier_svc.metrics import VerifierMetrics
from verifier_svc.policy.draft_policy import PAYING_DRAFTS, DraftPolicy
from verifier_svc.policy.draft_trees import best_chain
from verifier_svc.policy.forward_cost import ForwardCost
from verifier_svc.policy.pause_reasons import pause_of
from verifier_svc.policy.planner import Planner
from verifier_svc.policy.speculation_budget import SpeculationBudget
from verifier_svc.state.occupancy import Occupancy
from verifier_svc.state.scheduled_sequence import ScheduledSequence
from verifier_svc.state.sequence import Assignment, Sequence
from verifier_svc.state.step_clock import StepClock
from verifier_svc.state.target_device import NO_DEVICE, TargetDevice
from verifier_svc.state.trie import NO_DRAFT, DraftTree
from verifier_svc.vllm.outcome import Outcome, StepStates, computed_tokens

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Limits:
    """The bounds of one engine's sequences and drafts; all are counts."""

    vocab_size: int
    max_sequences: int
    max_waiting: int = 1024
    max_drafters: int = 64


@dataclass(slots=True)
class Judged:
    """The fate of one sequence's draft in a step, for the chunk that its client gets."""

    assignment: Assignment | None = None
    drafted: int = 0
    accepted: int = 0


class DraftHub:
    """The engine's side of drafting, for vLLM's scheduler.

    If two threads use the hub, the caller holds `turn`.
    `deliver` runs sinks on the event loop, see `Outbox`. `draft_policy` says when the planner asks
    for drafts.
    """

    is_own: ClassVar[bool] = True
    """True if our own server sends the requests. Only its requests may name their sequences."""

    def __init__(
        self,
        limits: Limits,
        policy: DraftTokensPolicy,
        metrics: VerifierMetrics,
        deliver: Callable[[list[Delivery]], None],
        draft_policy: DraftPolicy = PAYING_DRAFTS,
        clock: Clock = monotonic,
        *,
        target_device: TargetDevice = NO_DEVICE,
        states: StepStates | None = None,
    ) -> None:
        """`target_device` is where vLLM computes, as in `DraftExchange`.

        Without `states`, no drafter gets features.
        """
        self.limits = limits
        self.clock = clock
        self.turn = threading.Condition()
        """Held by a thread while it uses the hub; vLLM's thread does not hold it in a forward."""
        self.inbox = Inbox()
        self.sequences: dict[int, Sequence] = {}
        self.running: dict[int, Sequence] = {}
        self.waiting: dict[int, Sequence] = {}
        self.cost = ForwardCost()
        self.isolated_cost = ForwardCost()  # it learns only from trial steps
        budget = SpeculationBudget(self.isolated_cost)
        self.planner = Planner(policy, self.cost, budget, draft_policy, trees=False)
        self.drafting = DraftExchange(
            self.sequences,
            self.planner,
            metrics,
            target_device=target_device,
            features=states,
            clock=clock,
        )
        self._states = states
        self.drafting.roster.max_drafters = limits.max_drafters
        self.outbox = Outbox(deliver, self.drafting)
        self.book = SequenceBook(self.outbox, clock, limits.max_waiting, {})
        self.load_meter = LoadMeter(
            self.running, self.waiting, limits.max_sequences, limits.max_waiting, self.cost
        )
        self.judged: dict[int, Judged] = {}
        """Maps a sequence id to the fate of its draft in the last step."""
        self.failed = False
        """True if a fault has ended the drafting. Then nobody calls `begin` and `commit`."""
        self.trial_tokens: int | None = None
        """The number of draft tokens of each sequence in a trial step, which have random ids.

        None outside trials.
        """
        self._policy = policy
        self._metrics = metrics
        self._spans = StepSpans(metrics, clock)
        self._step_clock = StepClock(clock)
        self._wait = DraftWait(
            self, self.drafting, self.outbox, _admit_nobody, self.planner, self._step_clock, clock
        )
        self._by_request: dict[str, Sequence] = {}
        # Maps a request to the assignment whose draft the coming step verifies.
        self._chosen: dict[str, Assignment] = {}
        self._batch: dict[str, tuple[ScheduledSequence, Span]] = {}
        self._prompt_tokens = 0
        self._ended: set[str] = set()
        self._step_ended: float | None = None  # None after an idle period
        self._baseline = False
        self._lacked_memory = False
        self.is_stalled = False
        """True if the last step computed nothing, as while vLLM compiles a grammar."""
        self.preemption_count = 0
        """The number of times that vLLM has preempted a request."""
        self.bad_draft_count = 0
        """Drafts with ids that the vocabulary lacks. The exchange should have refused such a draft,
        so each is a fault of our code."""
        self._kv_cache_usage = 0.0  # at the last step

    # --- requests ---

    def new_sequence(
        self,
        request: TokenRequest,
        sink: Callable[[TokenChunk | OutriderError], None],
        span: Span,
        eos_token_ids: Collection[int],
    ) -> Sequence:
        """Return a new sequence, which waits for its place in vLLM's batch."""
        sequence = new_sequence(
            self.book.new_id(), request, sink, span, eos_token_ids, self._policy, self.clock()
        )
        self.sequences[sequence.id] = self.waiting[sequence.id] = sequence
        return sequence

    def open(self, request_id: str, sequence: Sequence) -> None:
        """Record the id by which vLLM knows the sequence."""
        self._by_request[request_id] = sequence

    def sequence_of(self, request_id: str) -> Sequence | None:
        """Return the sequence that vLLM knows by this id; None if it has ended."""
        return self._by_request.get(request_id)

    def close(self, request_id: str) -> None:
        """Record that a request ended. If a step ends it, it is closed after the commit."""
        if request_id in self._batch:
            self._ended.add(request_id)
        elif (sequence := self._by_request.pop(request_id, None)) is not None:
            self.forget(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Drop a sequence and tell its drafters that it has ended.

        No effect if it was dropped before.
        """
        if sequence.id not in self.sequences:
            return
        if self.trial_tokens is None:
            self.load_meter.ended(sequence, self.clock())
        self.pause_sequence(sequence)

    def pause_sequence(self, sequence: Sequence) -> None:
        """Take a sequence out of the batch and close it at its drafters; it may resume later."""
        self.sequences.pop(sequence.id, None)
        self.running.pop(sequence.id, None)
        self.waiting.pop(sequence.id, None)
        self.drafting.close(sequence)

    def preempted(self, request_id: str) -> None:
        """Record that vLLM took a request's pages. The sequence keeps its tokens and its tries."""
        self.preemption_count += 1
        sequence = self._by_request.get(request_id)
        if sequence is not None and self.running.pop(sequence.id, None) is not None:
            self.waiting[sequence.id] = sequence

    def load(self) -> Load:
        """Return how busy the engine is."""
        return replace(self.load_meter.load(), kv_cache_usage=self._kv_cache_usage)

    # --- before a step ---

    def in_turn(self) -> Collection[Sequence]:
        """Return the running sequences, whose drafts the next step may wait for."""
        return self.running.values()

    def plan_step(self, running: Iterable[tuple[str, int]]) -> None:
        """Plan the drafts of the next step and wait for them as long as that pays.

        `running` has the id and the number of computed tokens of each request that vLLM runs. Work
        that is posted meanwhile may add and end requests.
        """
        for request_id, computed in running:
            sequence = self._by_request.get(request_id)
            if sequence is not None:
                sequence.kv.num_computed_tokens = computed
        began = self.clock()
        outside_s = 0.0 if self._step_ended is None else max(began - self._step_ended, 0.0)
        self._step_clock.waited(0.0)
        if self.trial_tokens is None:
            while (seconds := self._wait.poll()) > 0.0:
                self.pause(seconds)
            self._wait.take_plan()
        self.outbox.send_to_drafters()
        self._baseline = self._step_clock.undisturbed_since(self.drafting.busy_until)
        self._step_clock.begin()
        self._step_clock.phases_s["send"] = outside_s
        self._chosen.clear()

    def pause(self, seconds: float) -> None:
        """Let other threads' work run, until some of it has run or `seconds` have passed."""
        self.outbox.send_to_drafters()
        self.inbox.wait(seconds)
        self.inbox.run_all()

    def choose(self, request_id: str, room: int) -> list[int]:
        """Return the draft of a decoding request, of at most `room` tokens; may be empty."""
        sequence = self._by_request.get(request_id)
        if sequence is None or room <= 0:
            return []
        if self.trial_tokens is not None:
            count = min(room, self.trial_tokens)
            return [random.randrange(self.limits.vocab_size) for _ in range(count)]
        wanted = min(room, self.drafting.plan.draft_tokens.get(sequence.id, 0))
        assignment, draft = best_chain(sequence, wanted)
        if assignment is None:
            return []
        self._chosen[request_id] = assignment
        return list(draft.token_ids)

    def drop(self, request_id: str, draft: list[int]) -> None:
        """Count a draft of `choose` that cannot be verified. The request then has no draft."""
        self._chosen.pop(request_id, None)
        self.bad_draft_count += 1
        if self.bad_draft_count == 1:
            log.error("a draft has ids that are none, and is dropped: %s; logged once", draft)

    def begin(
        self,
        scheduled: Mapping[str, int],
        drafts: Mapping[str, list[int]],
        computed: Mapping[str, int],
    ) -> None:
        """Begin a forward; `scheduled` has each request's number of tokens in it, draft included.

        `computed` has each request's number of tokens before these; the prefix cache may have had
        some of them.
        Sequences that are in a batch for the first time get their drafters now, while the forward
        reads their prompts.
        """
        self._batch.clear()
        batch: list[ScheduledSequence] = []
        known: list[str] = []
        self._prompt_tokens = 0
        for request_id, token_count in scheduled.items():
            sequence = self._by_request.get(request_id)
            if sequence is None:
                continue
            known.append(request_id)
            sequence.kv.num_computed_tokens = computed[request_id]
            batch.append(self._scheduled(sequence, request_id, token_count, drafts))
        spans = self._spans.begin(batch, self._step_clock.wait_s)
        pairs = zip(batch, spans, strict=True)
        self._batch = dict(zip(known, pairs, strict=True))
        self.load_meter.admitted()
        self.outbox.send_to_drafters()
        self._step_clock.end("pack")
        self.outbox.send_to_clients()
        self._metrics.flush()

    def _scheduled(
        self,
        sequence: Sequence,
        request_id: str,
        token_count: int,
        drafts: Mapping[str, list[int]],
    ) -> ScheduledSequence:
        drafted = drafts.get(request_id, [])
        # In the step of a prompt's last token vLLM reserves room for a draft, and fills it with -1.
        if drafted and drafted[0] < 0:
            token_count -= len(drafted)
            drafted = []
        assignment = self._chosen.get(request_id) if drafted else None
        own_count = token_count - len(drafted)
        samples = sequence.kv.num_computed_tokens + own_count >= len(sequence.tokens)
        if not (samples and own_count == 1):
            self._prompt_tokens += own_count
        if self.waiting.pop(sequence.id, None) is not None:
            self.running[sequence.id] = sequence
        if not sequence.admitted:
            sequence.admitted = True
            self.drafting.assign(sequence)
        return ScheduledSequence(
            sequence,
            sequence.kv.num_computed_tokens,
            [0] * own_count,
            DraftTree(drafted, []) if drafted else NO_DRAFT,
            assignment,
            samples,
            planned_draft_tokens=self.drafting.plan.draft_tokens.get(sequence.id, 0),
        )

    # --- after a step ---

    def computed(self) -> None:
        """Note that the forward of the step has ended."""
        self._step_clock.end("forward")

    def commit(self, outcomes: Collection[Outcome], occupancy: Occupancy) -> None:
        """Commit a step: send its verdicts, and learn from the fate of its drafts.

        `occupancy` has vLLM's present sequences and pages. Only its count of preemptions comes from
        the hub.
        """
        committed = 0
        self.judged.clear()
        self._take_features(outcomes)
        for outcome in outcomes:
            sequence = self._by_request.get(outcome.request_id)
            if sequence is not None and (outcome.committed or outcome.drafted):
                committed += len(outcome.committed)
                self._commit(sequence, outcome)
        batch = [scheduled for scheduled, _ in self._batch.values()]
        self._batch.clear()
        for request_id in self._ended:
            self.close(request_id)
        self._ended.clear()
        self._step_clock.end("commit")
        isolated_s = self._observe(batch, committed)
        self.outbox.send_to_drafters()
        self._spans.end(self._step_clock.phases_s)
        if batch and self.trial_tokens is None:
            self._metrics.generated(committed)
            self._metrics.step(self._step_clock.times(), isolated_s, len(batch))
        self._metrics.occupancy(occupancy)
        self.is_stalled = not batch
        self._kv_cache_usage = occupancy.pages
        if not self.sequences:
            self.go_idle()

    def go_idle(self) -> None:
        """Note that no request is left, so that the pause before the next step does not count."""
        self._metrics.flush()
        self._metrics.occupancy(Occupancy(preemptions=self.preemption_count))
        self.outbox.send_to_clients()
        self._kv_cache_usage = 0.0
        self._step_clock.idle()
        self._step_ended = None

    def _take_features(self, outcomes: Iterable[Outcome]) -> None:
        """Take the features of the step's tokens, and free the states of its forward."""
        states, sender = self._states, self.drafting.features
        if states is None:
            return
        if sender.has_readers:
            batch = {name: scheduled for name, (scheduled, _) in self._batch.items()}
            try:
                sender.take_rows(computed_tokens(states.first_rows, batch, outcomes))
            except torch.OutOfMemoryError as error:
                if not self._lacked_memory:
                    log.error("a step's features are dropped; logged once: %s", error)
                self._lacked_memory = True
        states.clear()

    def _commit(self, sequence: Sequence, outcome: Outcome) -> None:
        """Commit one sequence's part of a step, and send its drafters the verdict."""
        new, drafted = outcome.committed, outcome.drafted
        accepted = outcome.accepted_count
        scheduled, span = self._batch[outcome.request_id]
        assignment = scheduled.assignment
        if not drafted:
            self.drafting.note_pauses([sequence])
        sequence.tokens += new
        sequence.stats.record(len(drafted), accepted, _rule(sequence) if drafted else None)
        if sequence.stats.forward_count == 1:
            self._spans.prefilled(sequence)
        if span.traceparent:
            span.set(outrider__accepted_tokens=accepted, outrider__committed_tokens=len(new))
        if assignment is not None:
            draft = DraftTree(drafted, [])
            rows = range(1, accepted + 1)
            judge_draft(sequence, assignment, draft, rows).record(self._metrics, len(new))
        self.judged[sequence.id] = Judged(assignment, len(drafted), accepted)
        if outcome.request_id in self._ended:
            sequence.stats.paused = pause_of(sequence, self.drafting.plan)
        else:
            sequence.kv.num_computed_tokens = len(sequence.tokens) - 1
            self.drafting.send_verdicts(sequence, new, assignment, span)

    def _observe(self, batch: list[ScheduledSequence], committed: int) -> float:
        """Update the cost model; return the seconds of the same step on an idle machine.

        Return 0 for a step that is part of a trial, reads prompts, or follows an idle period.
        """
        seconds = self._step_clock.end_step()
        first = self._step_ended is None
        self._step_ended = self.clock()
        step_s = self._step_clock.times().step_s
        drafted = [len(each.draft.token_ids) for each in batch if each.samples]
        decoding = len(drafted) - sum([len(each.token_ids) > 1 for each in batch if each.samples])
        if first or not batch or self.trial_tokens is not None:
            return 0.0
        token_count = decoding + sum(drafted)
        self.cost.observe(decoding, token_count, step_s, self._prompt_tokens)
        if self._prompt_tokens:
            return 0.0
        if seconds < math.inf and not self.drafting.plan.always_draft_requested:
            baseline = self._baseline and token_count == len(batch)
            paying = self.drafting.plan.paying
            self.planner.budget.observe(len(batch), paying, committed, seconds, baseline=baseline)
        return self.isolated_cost.estimate(len(batch), token_count)

    # --- faults ---

    def give_up(self) -> None:
        """End all draft streams after a fault of our own; requests go on without drafts."""
        self.judged.clear()
        message = "the verifier failed at drafting; its log has the reason"
        for drafter in list(self.drafting.roster.connected.values()):
            self.drafting.reject(drafter, OutriderError(Reason.INTERNAL, message))
        self.outbox.send_to_drafters()


def _rule(sequence: Sequence) -> AcceptanceRule:
    greedy = sequence.request.sampling.greedy
    return AcceptanceRule.GREEDY if greedy else AcceptanceRule.COUPLED


def _admit_nobody() -> None:
    """Do nothing: vLLM admits requests."""
