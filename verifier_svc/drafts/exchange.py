"""Assigns sequences to drafters, takes their drafts, and sends them verdicts."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable

from outrider.errors import OutriderError, Reason
from outrider.process.clock import Clock, monotonic
from outrider.process.observability.telemetry import Span
from outrider.protocol.draft_messages import Closed, DraftBatch, Hello, StepBatch, Verdict
from outrider.protocol.messages import PauseReason
from verifier_svc.drafts.draft_message import DraftMessage
from verifier_svc.drafts.features import (
    FeatureSender,
    FeatureSource,
    copy_held_features,
    send_held_features,
)
from verifier_svc.drafts.new_assignment import new_assignment, run_ahead_window
from verifier_svc.drafts.roster import PLACES, Roster
from verifier_svc.metrics import VerifierMetrics
from verifier_svc.policy.pause_reasons import pause_reason
from verifier_svc.policy.plan import Plan
from verifier_svc.policy.planner import Planner
from verifier_svc.state.drafter import Drafter, held_bytes
from verifier_svc.state.merged_tries import is_branched, is_sampled, observe_siblings
from verifier_svc.state.sequence import FIRST_BACKOFF, Assignment, Sequence
from verifier_svc.state.target_device import NO_DEVICE, TargetDevice
from verifier_svc.state.trie import CommitWalk, Trie

# A drafter of unknown speed that does not answer counts as busy for this long.
_FIRST_ANSWER_S = 0.2

log = logging.getLogger(__name__)


class DraftExchange:
    """The engine's side of all draft streams; only the engine's thread uses it."""

    def __init__(
        self,
        sequences: dict[int, Sequence],
        planner: Planner,
        metrics: VerifierMetrics,
        *,
        sampled_drafts: bool = False,
        target_device: TargetDevice = NO_DEVICE,
        features: FeatureSource | None = None,
        clock: Clock = monotonic,
    ) -> None:
        """With `sampled_drafts`, trusted drafters may sample. `features` keeps hidden states.

        Drafters on `target_device` do not run ahead, since that would slow down forwards.
        """
        self.roster = Roster(clock)
        self.plan = Plan()
        """The plan of the step in progress, or of the last step if none is in progress."""
        self.rejections: list[tuple[Drafter, OutriderError]] = []
        self.features = FeatureSender(features)
        self.assigned = 0
        """Counts the assignments of sequences to drafters, and the drafters that left."""
        self._planner = planner
        self._sequences = sequences
        self._metrics = metrics
        self._sampled_drafts = sampled_drafts
        self._target_device = target_device
        self._clock = clock
        # Walks that `record_walks` still has to count. Each entry has the assignment, the number of
        # tokens that were asked for, the number of tokens that the draft had, the trie's walk, and
        # whether the metrics get the walk.
        self._walks: list[tuple[Assignment, int, int, CommitWalk, bool]] = []

    @property
    def busy_until(self) -> float:
        """The time when all drafters should have filled their windows (seconds)."""
        return max([drafter.busy_until for drafter in self.roster.connected.values()], default=0.0)

    # --- drafters come and go ---

    def join(
        self,
        hello: Hello,
        sink: Callable[[StepBatch | OutriderError], None],
        *,
        trusted: bool = True,
        is_local: bool = False,
        holder: str = "",
        source: str = "",
    ) -> Drafter:
        """Register a drafter, and assign it to running sequences where the roster chooses it.

        `trusted` says whether sampled drafts may be accepted by the distributions that this drafter
        claims. With `is_local`, the drafter gets its features as tensors. For `holder` and `source`
        see `Drafter`. Raises as `Roster.join` and `FeatureSender.grant` do.
        """
        drafter = Drafter(hello, sink, holder, source, is_local=is_local, trusted=trusted)
        self.features.grant(drafter)
        drafter.on_target_device = self._target_device.is_shared(hello.placement)
        self.roster.join(drafter)
        self._metrics.joined(drafter)
        self.features.watch(self.roster.connected.values())
        for sequence in self._sequences.values():
            if sequence.admitted and sequence.unread_at is None:
                self.assign(sequence)
        return drafter

    def leave(self, drafter: Drafter) -> None:
        """Remove a drafter whose stream is over, and assign its sequences to other drafters."""
        self.assigned += 1
        orphans = [self._sequences[i] for i in drafter.sequence_ids if i in self._sequences]
        self.roster.leave(drafter)
        self.features.watch(self.roster.connected.values())
        self._planner.budget.forget(drafter)
        for sequence in orphans:
            sequence.assignments.pop(drafter.id, None)
            self.assign(sequence)
        for drafter_id in self.roster.forget():
            self._metrics.forget(drafter_id)

    def drain(self, drafter: Drafter, byte_count: int) -> None:
        """Assign no more sequences to a drafter that is about to leave."""
        drafter.taken_bytes += held_bytes(byte_count)
        drafter.draining = True

    def reject(self, drafter: Drafter, error: OutriderError) -> None:
        """End the drafter's stream with `error`, and count a protocol violation.

        INTERNAL is a fault of this verifier and does not count. The drafter's sequences go to other
        drafters. The method has no effect if the drafter is not connected.
        """
        if self.roster.connected.get(drafter.id) is not drafter:
            return
        log.warning("drafter %s: %s", drafter.id, error)
        if error.reason is not Reason.INTERNAL:
            self.roster.count_fault(drafter)
        self.rejections.append((drafter, error))
        self.leave(drafter)

    # --- sequences come and go ---

    def assign(self, sequence: Sequence) -> None:
        """Assign an admitted sequence to the drafters that the roster chooses.

        Call it only after admission, because a queued sequence would occupy a draft model's cache.
        """
        if sequence.max_draft_tokens == 0:
            return
        chosen = self.roster.choose(sequence.request, sequence.assignments, sequence.past_drafters)
        self.assigned += len(chosen)
        _make_room(sequence, PLACES - len(chosen))
        for drafter in chosen:
            assignment = new_assignment(sequence, drafter, self._sampled_drafts)
            sequence.assignments[drafter.id] = assignment
            wanted = self._planner.first_draft_tokens(sequence, assignment, self.plan)
            assignment.asked = wanted > 0
            assignment.draft_tokens = max(1, wanted)
            drafter.sequence_ids.add(sequence.id)
            if wanted > 0 or drafter not in self.plan.unprobed:
                self._open(sequence, assignment, wanted)

    def close(self, sequence: Sequence) -> None:
        """Tell the sequence's drafters that its present id has ended; a new id may follow."""
        for assignment in sequence.assignments.values():
            _tell_closed(sequence, assignment)
        sequence.assignments.clear()

    # --- drafts arrive ---

    def on_drafts(
        self,
        drafter: Drafter,
        batch: DraftBatch,
        byte_count: int = 0,
        arrived_at: float | None = None,
    ) -> None:
        """Add a message's proposals to the tries.

        A drafter that breaks the protocol loses its stream; other drafters keep theirs.
        `arrived_at` is when the message arrived (monotonic seconds; None is now). Without this
        time, the forward since the arrival would count as the drafter's time, and a drafter that
        just missed a step would seem too slow.
        """
        at = self._clock() if arrived_at is None else arrived_at
        is_timed = drafter.round_trip.value > 0.0
        drafter.busy_until = max(drafter.busy_until, at) if is_timed else at
        drafter.taken_bytes += held_bytes(byte_count, batch)
        if self.roster.connected.get(drafter.id) is not drafter:
            return
        self._metrics.received(drafter, byte_count)
        drafter.hear()
        message = DraftMessage(drafter, at, self._sequences)
        try:
            message.take(batch)
        except OutriderError as error:
            self.reject(drafter, error)
        # If a message triggers a fault in our own code, only that drafter's stream ends.
        except Exception:
            log.exception("a message of drafter %s could not be processed", drafter.id)
            text = "the drafts could not be processed; the verifier's log has the reason"
            self.reject(drafter, OutriderError(Reason.INTERNAL, text))
        self._metrics.proposed(drafter, message.token_count, message.stale_count, message.cut_count)
        self._metrics.answered(drafter, message.draft_latencies_s)
        message.update_latencies()

    def ignore(self, drafter: Drafter, byte_count: int) -> None:
        """Count a message of a kind that only a later version knows."""
        drafter.taken_bytes += held_bytes(byte_count)
        self._metrics.ignored(drafter)

    def note_pauses(self, sequences: Iterable[Sequence]) -> None:
        """For each of these sequences, count a step that verified no draft of it, by reason.

        A sequence that could not have a draft in this step is not counted.
        Call it before the step's tokens are committed and its verdicts are sent.
        """
        counts: dict[PauseReason, int] = {}
        for sequence in sequences:
            first = sequence.stats.forward_count == 0
            if first or sequence.max_draft_tokens == 0 or sequence.most_draft_tokens == 0:
                continue
            reason = pause_reason(sequence, self.plan, self._planner.budget)
            sequence.pauses[reason] = sequence.pauses.get(reason, 0) + 1
            counts[reason] = counts.get(reason, 0) + 1
        for reason, count in counts.items():
            self._metrics.paused(reason, count)

    # --- verdicts go out ---

    def send_verdicts(
        self, sequence: Sequence, new_token_ids: list[int], verified: Assignment | None, span: Span
    ) -> None:
        """Move the roots of the sequence's tries along the committed tokens, and send verdicts.

        The plan says which drafters get a verdict.

        `verified` is the assignment whose draft the step verified; `span` is the step's span.
        `record_walks` later counts how many of `new_token_ids` the tries had.
        """
        lookups: list[str] = []
        planned = self.plan.draft_tokens.get(sequence.id, 0)
        now = self._clock()
        passes_on = False
        if verified is not None and self.plan.token_costs:
            _observe_siblings(sequence, verified, new_token_ids, self.plan.threshold)
        for assignment in sequence.assignments.values():
            drafter = assignment.drafter
            trie = assignment.trie
            guessed = min(len(trie.main_path), len(new_token_ids))
            skipped = trie.node_count == 0 and trie.ready(1)
            offered, length = assignment.final_length(planned)
            walk = trie.advance(new_token_ids)
            counts = assignment.asked and not skipped
            self._walks.append((assignment, offered, length, walk, counts))
            if counts and span.traceparent:
                lookups.append(f"{drafter.id}: {walk.result.value}, {walk.wasted} wasted")
            right = min(walk.on_main_path, guessed)
            if guessed and assignment is not verified:
                # The step did not verify these guesses (a probe's, for example). The committed
                # tokens show which of them were right.
                assignment.observe_acceptance(guessed, right)
            assignment.follow(guessed, right, self.plan.decode_step_s, skipped=skipped)
            if assignment.asked and assignment.asked_at:
                assignment.count_silence(now)
            passes_on = passes_on or (assignment.asked and drafter.is_doubtful)
            wanted = _tokens_to_ask(self.plan, sequence, assignment)
            if wanted or assignment in self.plan.probes:
                self._ask(sequence, assignment, wanted, walk.matched, span.traceparent, now)
            else:
                assignment.asked = False
                copy_held_features(assignment)
        if lookups:
            span.set(outrider__lookups="; ".join(lookups))
        if passes_on:
            self.assign(sequence)

    def record_walks(self) -> None:
        """Record the draft lengths at the last commits, and the guesses that were committed."""
        for assignment, offered, length, walk, counts in self._walks:
            assignment.observe_length(offered, length, walk.on_main_path)
            if counts:
                self._metrics.walked(assignment.drafter, walk)
        self._walks.clear()

    def count_messages(self) -> None:
        """Count the messages that are about to be sent, and look for drafters that fell silent.

        A silent drafter's sequences are assigned to other drafters too, if there are any.
        """
        now = self._clock()
        for drafter in self.roster.connected.values():
            if drafter.outbox.opened or drafter.outbox.verdicts:
                drafter.tell(now, self.plan.decode_step_s)
            self._watch_acceptance(drafter, now)
            self._watch_pause(drafter)
            if drafter.fell_silent(now):
                for sequence_id in sorted(drafter.sequence_ids):
                    self.assign(self._sequences[sequence_id])

    def _watch_pause(self, drafter: Drafter) -> None:
        """Set the metric of paused drafting when plans start or stop asking the drafter."""
        if drafter not in self.plan.considered:
            return
        paused = drafter not in self.plan.paying
        if paused is not drafter.paused:
            drafter.paused = paused
            self._metrics.drafting_paused(drafter, paused)

    def _watch_acceptance(self, drafter: Drafter, now: float) -> None:
        """If a drafter's acceptance has fallen or recovered, log and export that."""
        watch = drafter.acceptance_watch
        if not watch.look(drafter.verified_count, drafter.accepted_count, now):
            return
        self._metrics.acceptance_fell(drafter, watch.fell)
        log.log(
            logging.WARNING if watch.fell else logging.INFO,
            "drafter %s: %.0f %% of its last tokens were accepted, after %.0f %% %s",
            drafter.id,
            100 * watch.rate,
            100 * (watch.first_rate or 0.0),
            watch.basis,
        )

    def _ask(
        self,
        sequence: Sequence,
        assignment: Assignment,
        wanted: int,
        accepted: int,
        traceparent: str,
        now: float,
    ) -> None:
        """Write a step's verdict, with all tokens that the drafter was not told of before.

        A sequence that is not open at the drafter is opened instead. Call this after the trie was
        advanced. If `wanted` is 0, the message is a probe.
        """
        was_asked = assignment.asked
        assignment.asked = wanted > 0
        if wanted > 0:
            assignment.backoff = FIRST_BACKOFF
        else:
            assignment.back_off()
        assignment.draft_tokens = max(1, wanted)
        if not assignment.opened:
            self._open(sequence, assignment, wanted)
            return
        length = len(sequence.tokens)
        new_token_ids = sequence.tokens[assignment.sent_length :]
        assignment.sent_length = length
        trees = assignment.tree_tokens = self.plan.tree_tokens.get(assignment, 0)
        window = run_ahead_window(assignment, wanted, self.plan.decode_step_s, trees)
        changed = window is not assignment.window
        assignment.window = window
        _mark_sent(assignment, now)
        verdict = Verdict(
            sequence.id,
            length,
            new_token_ids,
            accepted,
            assignment.draft_tokens,
            window if changed else None,
            traceparent,
            trees,
        )
        assignment.drafter.outbox.verdicts.append(verdict)
        if assignment.held_features:
            send_held_features(assignment)
        # A drafter that has not been asked for some time must first compute the tokens committed
        # meanwhile, so the time of its answer says little about its speed. The answer to a probe is
        # timed nevertheless, because the purpose of a probe is to measure.
        must_draft = assignment.answered_length > 0 and assignment.trie.node_count == 0
        if must_draft and (was_asked or wanted == 0):
            assignment.expect_answer(length)

    def _open(self, sequence: Sequence, assignment: Assignment, wanted: int) -> None:
        """Announce the sequence to a drafter; before that the drafter spends no time on it."""
        drafter = assignment.drafter
        length = len(sequence.tokens)
        if length > assignment.sent_length:
            assignment.trie = Trie(length, assignment.trie.window)
            assignment.sent_length = length
        assignment.opened = True
        # A new sequence's first draft is a chain: no plan has the assignment yet.
        trees = assignment.tree_tokens = self.plan.tree_tokens.get(assignment, 0)
        step_s = self.plan.decode_step_s
        assignment.window = run_ahead_window(assignment, wanted, step_s, trees)
        _mark_sent(assignment, self._clock())
        drafter.last_sequence_id = max(drafter.last_sequence_id, sequence.id)
        drafter.outbox.opened.append(sequence.opened_for(assignment))


def _tell_closed(sequence: Sequence, assignment: Assignment) -> None:
    drafter = assignment.drafter
    drafter.sequence_ids.discard(sequence.id)
    if not drafter.sequence_ids:
        # A drafter without sequences owes no answer.
        drafter.silent_at = math.inf
    if assignment.opened:
        drafter.outbox.closed.append(Closed(sequence.id))


def _make_room(sequence: Sequence, most: int) -> None:
    """Remove doubtful drafters from the sequence until it has at most `most` drafters."""
    doubtful = [each for each in sequence.assignments.values() if each.drafter.is_doubtful]
    for assignment in doubtful[: max(len(sequence.assignments) - most, 0)]:
        _tell_closed(sequence, assignment)
        del sequence.assignments[assignment.drafter.id]
        sequence.past_drafters.add(assignment.drafter.id)


def _tokens_to_ask(plan: Plan, sequence: Sequence, assignment: Assignment) -> int:
    """Return how many draft tokens the plan asks of a drafter; 0 if it does not ask."""
    if sequence.id in plan.planned_ids:
        return plan.asks.get(assignment, 0)
    # The sequence was admitted, or got this drafter, after the step was planned.
    return assignment.draft_tokens if assignment.asked else 0


def _observe_siblings(
    sequence: Sequence, verified: Assignment, new_token_ids: list[int], threshold: float
) -> None:
    """Measure how often a sibling of a wrong main guess was right.

    Call this before the tries' roots move.
    """
    if is_sampled(sequence):
        return  # the sequence's drafts stay chains
    if is_branched(sequence):
        observe_siblings(sequence, verified, new_token_ids, threshold)
    elif verified.tree_tokens > 0 and verified.trie.is_contradicted(new_token_ids):
        verified.sibling_rates.observe_wrong(False)


def _mark_sent(assignment: Assignment, now: float) -> None:
    """Note that a message is sent to the drafter now, and when the drafter will be done."""
    drafter = assignment.drafter
    drafter.may_answer(assignment.window.token_count)
    assignment.told_at = now
    if drafter.round_trip.value > 0.0:
        done_at = now + drafter.latency(assignment.window.depth)
        drafter.busy_until = max(drafter.busy_until, done_at)
    elif drafter.busy_until == 0.0 or drafter.on_target_device:
        # The drafter's speed is not known yet. A drafter that never answers must not count as busy
        # for ever.
        drafter.busy_until = now + _FIRST_ANSWER_S
