"""Hands sequences to drafters, takes their drafts, and tells them what was committed."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from functools import partial

from outrider.errors import OutriderError, Reason
from outrider.messages import MAX_DEPTH, Closed, CloseReason, DraftBatch, Hello, StepBatch, Verdict, Window
from outrider.telemetry import Span
from verifier_svc.depth import AcceptanceRate
from verifier_svc.drafters import MESSAGE_BYTES, Drafter, Roster
from verifier_svc.metrics import Metrics
from verifier_svc.planning import Planner
from verifier_svc.sequence import Assignment, Sequence
from verifier_svc.trie import Fate, Trie
from verifier_svc.trust import how_to_propose

log = logging.getLogger(__name__)

# A drafter may have twice the verified depth under way: the path being verified, its bonus token, and the path behind that.
_AHEAD = 2
_NODES_PER_DEPTH = 6
# A way to the drafter that takes less than this share of a forward is not worth hiding, at the price of the forward's own cores.
_NEAR = 0.05
# What is believed of a drafter before it was tried on a sequence. Hopeful, because what is believed bad is never tried.
_OPTIMISM = 0.8
# Of what is known of a drafter beyond one sequence a hundred drafts count: with ten, optimism alone would leave one that is always
# wrong a rate of 0.23 on each new sequence.
_LONG_MEMORY = 0.99


class Drafting:
    """The engine's side of all draft streams; used on the engine's thread alone."""

    def __init__(
        self,
        sequences: dict[int, Sequence],
        planner: Planner,
        metrics: Metrics,
        *,
        trust_distributions: bool = False,
        own_cores: frozenset[int] | None = None,
    ) -> None:
        """`own_cores` are those that the target computes on, unless some are left for others or it computes elsewhere."""
        self.roster = Roster()
        self.planner = planner
        self.rejections: list[tuple[Drafter, OutriderError]] = []
        self._sequences = sequences
        self._metrics = metrics
        self._trust_distributions = trust_distributions
        self._own_cores = own_cores

    # --- drafters come and go ---

    def join(self, hello: Hello, sink: Callable[[StepBatch | OutriderError], None]) -> Drafter:
        """Register a drafter and hand it the admitted sequences that lack one of its family; raises as `Roster.join`."""
        drafter = Drafter(hello, sink)
        drafter.on_target_cores = self._own_cores is not None and drafter.shares(self._own_cores)
        self.roster.join(drafter)
        for sequence in self._sequences.values():
            if sequence.admitted:
                self.hand_out(sequence)
        return drafter

    def leave(self, drafter: Drafter) -> None:
        """Its stream is over: drop its tries and hand its sequences to others."""
        orphans = [self._sequences[i] for i in drafter.sequence_ids if i in self._sequences]
        self.roster.leave(drafter)
        for sequence in orphans:
            sequence.assignments.pop(drafter.id, None)
            self.hand_out(sequence)
        for drafter_id in self.roster.forget():
            self._metrics.forget(drafter_id)

    def drain(self, drafter: Drafter) -> None:
        """It is about to leave: hand it no more sequences."""
        drafter.draining = True

    def reject(self, drafter: Drafter, error: OutriderError) -> None:
        """Count a protocol violation and end the drafter's stream with the reason; its sequences go to others."""
        if self.roster.connected.get(drafter.id) is not drafter:
            return
        log.warning("drafter %s: %s", drafter.id, error)
        self.roster.fault(drafter)
        self.rejections.append((drafter, error))
        self.leave(drafter)

    # --- sequences come and go ---

    def hand_out(self, sequence: Sequence) -> None:
        """Announce the sequence to the drafters it lacks, once it is admitted: what only waits would fill a draft model's cache."""
        if sequence.depth_limit == 0:
            return
        for drafter in self.roster.choose(sequence.request.speculation, sequence.assignments):
            limit = sequence.depth_limit
            reach = min(_AHEAD * limit + 1, drafter.hello.max_depth)
            trie = Trie(Window(node_count=_NODES_PER_DEPTH * reach, depth=reach))
            rule = how_to_propose(sequence.request, drafter.hello.distributions, self._trust_distributions)
            kind = _kind(sequence)
            learned = drafter.rates.get(kind)
            if learned is None:
                learned = drafter.rates[kind] = AcceptanceRate(_OPTIMISM, decay=_LONG_MEMORY)
            assignment = Assignment(drafter, trie, rule, AcceptanceRate(learned, limit), learned, trie.window, limit)
            sequence.assignments[drafter.id] = assignment
            assignment.depth = max(1, self.planner.depth_for(sequence, assignment))
            assignment.window = self._window(assignment, assignment.depth)
            assignment.ahead, assignment.told_at = assignment.window.depth > assignment.depth, time.monotonic()
            drafter.sequence_ids.add(sequence.id)
            drafter.last_sequence_id = max(drafter.last_sequence_id, sequence.id)
            drafter.outbox.opened.append(sequence.opened_for(assignment))
            if not self.planner.pays(sequence, assignment):
                assignment.pause.begin([])
        # It may be drafted before it is planned for.
        sequence.depth = self.planner.depth_of(sequence)

    def close(self, sequence: Sequence) -> None:
        """Tell its drafters that the sequence is over."""
        for assignment in sequence.assignments.values():
            assignment.drafter.sequence_ids.discard(sequence.id)
            assignment.drafter.outbox.closed.append(Closed(sequence.id, CloseReason.ENDED))
        sequence.assignments.clear()

    # --- drafts and verdicts ---

    def take(self, drafter: Drafter, batch: DraftBatch, byte_count: int = 0, arrived_at: float | None = None) -> None:
        """Hang proposals into the tries; a drafter that breaks the protocol loses its stream, and no one else notices.

        `arrived_at` is when they came (monotonic seconds; None is now), which may be a forward ago. Were that forward counted as
        the drafter's time, one answer that came just too late would make it seem too slow to be waited for, and so all after it.
        """
        at = time.monotonic() if arrived_at is None else arrived_at
        drafter.taken_bytes += byte_count + MESSAGE_BYTES
        if self.roster.connected.get(drafter.id) is not drafter:
            return
        self._metrics.received(drafter, byte_count)
        # How long answers took, and how many tokens were drafted for them. A message counts once: else one slow round of a large
        # batch would be all that is remembered.
        drafts_s: list[float] = []
        skips_s: list[float] = []
        draft_length = token_count = stale_count = 0
        # All are drafted together, and the longest sets the time.
        draft_s = max((proposal.draft_seconds for proposal in batch.proposals), default=0.0)
        try:
            for proposal in batch.proposals:
                assignment = self._assignment(drafter, proposal.sequence_id, "proposal.sequence_id")
                length = len(proposal.token_ids)
                if assignment is None or assignment.trie.add(proposal) is Fate.STALE:
                    stale_count += length
                token_count += length
                if assignment is None:
                    continue
                if (seconds := assignment.answered(at, proposal.epoch, drafted=True)) is not None:
                    drafts_s.append(seconds)
                    assignment.undrafted = proposal.epoch
                if assignment.undrafted == proposal.epoch and proposal.draft_seconds > 0.0:
                    draft_length = max(draft_length, length)
                    assignment.undrafted = -1
            for skip in batch.skips:
                if assignment := self._assignment(drafter, skip.sequence_id, "skip.sequence_id"):
                    assignment.trie.skip(skip)
                    if (seconds := assignment.answered(at, skip.epoch, drafted=False)) is not None:
                        skips_s.append(seconds)
        except OutriderError as error:
            self.reject(drafter, error)
        except Exception:  # logged; a fault that a drafter's message brings to light costs that drafter's stream
            log.exception("what drafter %s said could not be taken in", drafter.id)
            self.reject(
                drafter, OutriderError(Reason.INTERNAL, "the drafts could not be taken in; the verifier's log has the reason")
            )
        self._metrics.proposed(drafter, token_count, stale_count)
        self._metrics.answered(drafter, drafts_s)
        if answers := [*drafts_s, *skips_s]:
            drafter.reply.observe(max(max(answers) - draft_s, 0.0))
        if draft_length:
            drafter.token_time.observe(draft_s / draft_length)

    def ignore(self, drafter: Drafter, byte_count: int) -> None:
        """A message came of a kind that only a later version knows."""
        drafter.taken_bytes += byte_count + MESSAGE_BYTES
        self._metrics.ignored(drafter)

    def _assignment(self, drafter: Drafter, sequence_id: int, field_name: str) -> Assignment | None:
        """None for a sequence that is over, or in other hands by now: a late message looks the same, so it is counted and ignored.

        Raises OutriderError(PROTOCOL_VIOLATION) for one that the drafter cannot have been handed yet, which no delay explains.
        """
        if sequence_id > drafter.last_sequence_id:
            message = f"{field_name} must be one that was opened, at most {drafter.last_sequence_id}, not {sequence_id}"
            raise OutriderError(Reason.PROTOCOL_VIOLATION, message, field_name)
        sequence = self._sequences.get(sequence_id)
        return sequence.assignments.get(drafter.id) if sequence is not None else None

    def acknowledge(self, sequence: Sequence, new_token_ids: list[int], span: Span) -> None:
        """Move every trie's root along the committed tokens and tell its drafter, unless it is paused; `span` is the step's."""
        found: list[str] = []
        for assignment in sequence.assignments.values():
            pause, trie, drafter = assignment.pause, assignment.trie, assignment.drafter
            epoch = trie.epoch
            skipped = trie.node_count == 0 and trie.ready(1)
            walk = trie.advance(new_token_ids)
            if pause.steps_left == 0 and not skipped:
                self._metrics.walked(drafter, walk)
                if span.traceparent:
                    found.append(f"{drafter.id}: {walk.hit.value}, {walk.wasted} wasted")
            if pause.steps_left > 0:
                # The batch, too, decides what pays, and it changes.
                pays = self.planner.pays(sequence, assignment)
                if not pause.step(new_token_ids, partial(self.planner.affords_probe, assignment), pays):
                    continue
            elif trie.epoch != epoch:
                if not self.planner.pays(sequence, assignment):
                    pause.begin(new_token_ids)
                    continue
                pause.forget()
            told = pause.end() if pause.withheld else new_token_ids
            drafter.outbox.verdicts.append(self._verdict(sequence, assignment, told, walk.matched, span.traceparent))
            # What a drafter has to read first, back from a pause, is not how long it takes to draft; a probe is meant to tell.
            timed = assignment.met and (told is new_token_ids or pause.probing)
            if timed and (trie.epoch != epoch or trie.node_count == 0):
                assignment.begin_epoch()
        if found:
            span.set(outrider__lookups="; ".join(found))

    def _verdict(self, sequence: Sequence, assignment: Assignment, told: list[int], accepted: int, traceparent: str) -> Verdict:
        """The acknowledgement of a step, after the trie has been advanced; with depth and window where they change."""
        trie = assignment.trie
        wanted = self.planner.depth_to_ask(sequence, assignment) or 1
        # What is committed until the draft is there counts as its first tokens.
        depth = wanted + self.planner.steps_without(assignment, wanted)
        if depth > trie.window.depth:
            depth = trie.window.depth
        window = self._window(assignment, depth)
        assignment.ahead, assignment.told_at = window.depth > wanted, time.monotonic()
        if depth == assignment.depth and window is assignment.window:
            return Verdict(sequence.id, trie.epoch, trie.root, len(sequence.tokens), accepted, told, None, traceparent)
        assignment.depth, assignment.window = depth, window
        return Verdict(sequence.id, trie.epoch, trie.root, len(sequence.tokens), accepted, told, window, traceparent, depth)

    def _window(self, assignment: Assignment, depth: int) -> Window:
        """How far to run ahead: a draft for each step until the drafter hears of this one, as far as the trie has room; or not at
        all where that would take cores from the forward for no gain.

        What was drafted ahead spares the way to the drafter and its drafting if the whole draft stands, those of all its sequences,
        since a step waits for all; else it was for nothing.
        """
        drafter, step_s, most = assignment.drafter, self.planner.plain_s, assignment.trie.window
        reply_s = drafter.reply.value
        if drafter.on_target_cores:
            together = min(self.planner.batch, len(drafter.sequence_ids))
            hit, draft_s = assignment.rate.stands(depth) ** max(together, 1), depth * drafter.token_time.value
            if reply_s < _NEAR * step_s or hit * (reply_s + draft_s) <= draft_s:
                return _as_before(assignment, depth, depth)
        steps = 1 + math.ceil(reply_s / step_s) if step_s > 0.0 else MAX_DEPTH
        reach = min((1 + steps) * (1 + depth) - 1, most.depth)
        return _as_before(assignment, min(_NODES_PER_DEPTH * reach, most.node_count), reach)

    def judge(self, assignment: Assignment, drafted: int, accepted: int) -> None:
        """Let the outcome of a verified draft teach the rates and the metrics."""
        drafter = assignment.drafter
        # A probe has its answer; from here on the drafter is judged as all others are.
        assignment.pause.probing = False
        assignment.rate.observe(drafted, accepted)
        assignment.learned.observe(drafted, accepted)
        drafter.verified_count += drafted
        drafter.accepted_count += accepted
        self._metrics.verified(drafter, drafted, accepted)


def _as_before(assignment: Assignment, node_count: int, depth: int) -> Window:
    """The window; the very one that the drafter was told of, if that is the same."""
    before = assignment.window
    return before if before.depth == depth and before.node_count == node_count else Window(node_count, depth)


def _kind(sequence: Sequence) -> tuple[bool, bool, bool]:
    """Traffic that drafters should be as good at as they were before: greedy or not, under a grammar, with a prediction."""
    request = sequence.request
    return request.sampling.greedy, request.grammar is not None, bool(request.prediction)
