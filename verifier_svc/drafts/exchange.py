"""Hands sequences to drafters, takes their drafts, and tells them what was committed."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from outrider.clock import Clock, monotonic
from outrider.errors import OutriderError, Reason
from outrider.limits import MAX_DRAFT_TOKENS
from outrider.messages import (
    Closed,
    CloseReason,
    DraftBatch,
    Hello,
    Proposal,
    Skip,
    StepBatch,
    Verdict,
    Window,
)
from outrider.process.telemetry import Span
from verifier_svc.drafts.roster import Roster
from verifier_svc.metrics import Metrics
from verifier_svc.policy.plan import Plan
from verifier_svc.policy.planner import Planner
from verifier_svc.state.acceptance_rate import AcceptanceRate
from verifier_svc.state.drafter import MESSAGE_BYTES, Drafter
from verifier_svc.state.sequence import FIRST_BACKOFF, Assignment, Sequence
from verifier_svc.state.trie import Added, Trie
from verifier_svc.verification.rule_choice import how_to_propose

log = logging.getLogger(__name__)

# A drafter may have twice the verified depth under way: the path being verified, its bonus token, and the path behind that.
_AHEAD = 2
_TOKENS_PER_DEPTH = 6
# What is believed of a drafter before it was tried on a sequence. Hopeful, because what is believed bad is never tried.
_OPTIMISM = 0.8
# Of what is known of a drafter beyond one sequence a hundred drafts count: with ten, optimism alone would leave one that is always
# wrong a rate of 0.23 on each new sequence.
_LONG_MEMORY = 0.99
_KNOWN_POSITIONS = 16


@dataclass(slots=True)
class _Answers:
    """What a message of a drafter says about its speed, and how many of its tokens came to what.

    A message counts once: else one slow round of a large batch would be all that is remembered.
    """

    drafts_s: list[float] = field(default_factory=list)
    """Seconds from asking to each draft that answers, and to each skip."""
    skips_s: list[float] = field(default_factory=list)
    draft_s: float = 0.0
    """Seconds of drafting. All of a message is drafted together, and its longest proposal sets the time."""
    draft_length: int = 0
    """Tokens of the longest."""
    token_count: int = 0
    stale_count: int = 0
    cut_count: int = 0

    def teach(self, drafter: Drafter) -> None:
        """Let the drafter's measured times learn."""
        answers_s = [*self.drafts_s, *self.skips_s]
        if answers_s:
            drafter.round_trip.observe(max(max(answers_s) - self.draft_s, 0.0))
        if self.draft_length and self.draft_s > 0.0:
            drafter.token_time.observe(self.draft_s / self.draft_length)


class DraftExchange:
    """The engine's side of all draft streams; used on the engine's thread alone."""

    def __init__(
        self,
        sequences: dict[int, Sequence],
        planner: Planner,
        metrics: Metrics,
        *,
        trust_distributions: bool = False,
        own_cores: frozenset[int] | None = None,
        clock: Clock = monotonic,
    ) -> None:
        """`own_cores` are those that the target computes on, unless some are left for others or it computes elsewhere."""
        self.roster = Roster(clock)
        self.plan = Plan()
        """The plan of the step in progress, or of the last one."""
        self.rejections: list[tuple[Drafter, OutriderError]] = []
        self._planner = planner
        self._sequences = sequences
        self._metrics = metrics
        self._trust_distributions = trust_distributions
        self._own_cores = own_cores
        self._clock = clock

    @property
    def busy_until(self) -> float:
        """When no drafter computes any more, by all that is known (seconds)."""
        return max([drafter.busy_until for drafter in self.roster.connected.values()], default=0.0)

    # --- drafters come and go ---

    def join(self, hello: Hello, sink: Callable[[StepBatch | OutriderError], None]) -> Drafter:
        """Register a drafter and hand it the admitted sequences that lack one of its family; raises as `Roster.join`."""
        drafter = Drafter(hello, sink)
        drafter.on_target_cores = self._own_cores is not None and drafter.shares(self._own_cores)
        self.roster.join(drafter)
        for sequence in self._sequences.values():
            if sequence.admitted:
                self.assign(sequence)
        return drafter

    def leave(self, drafter: Drafter) -> None:
        """Its stream is over: drop its tries and hand its sequences to others."""
        orphans = [self._sequences[i] for i in drafter.sequence_ids if i in self._sequences]
        self.roster.leave(drafter)
        self._planner.budget.forget(drafter)
        for sequence in orphans:
            sequence.assignments.pop(drafter.id, None)
            self.assign(sequence)
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

    def assign(self, sequence: Sequence) -> None:
        """Announce the sequence to the drafters it lacks, once it is admitted: what only waits would fill a draft model's cache."""
        if sequence.max_draft_tokens == 0:
            return
        for drafter in self.roster.choose(sequence.request.speculation, sequence.assignments):
            assignment = sequence.assignments[drafter.id] = self._assign(sequence, drafter)
            wanted = self._planner.first_draft_tokens(sequence, assignment, self.plan)
            assignment.asked, assignment.draft_tokens = wanted > 0, max(1, wanted)
            drafter.sequence_ids.add(sequence.id)
            if wanted > 0 or drafter not in self.plan.silent:
                self._open(sequence, assignment, wanted)

    def _open(self, sequence: Sequence, assignment: Assignment, wanted: int) -> None:
        """Announce the sequence to a drafter; until then the drafter spends no time on it."""
        drafter, length = assignment.drafter, len(sequence.tokens)
        if length > assignment.told_length:
            assignment.trie, assignment.told_length = Trie(length, assignment.trie.window), length
        assignment.opened, assignment.window = True, self._window(assignment, wanted)
        self._told(assignment)
        drafter.last_sequence_id = max(drafter.last_sequence_id, sequence.id)
        drafter.outbox.opened.append(sequence.opened_for(assignment))

    def _told(self, assignment: Assignment) -> None:
        """Note that a drafter hears of a step now, and until when it computes."""
        drafter, now = assignment.drafter, self._clock()
        assignment.told_at = now
        if drafter.round_trip.value > 0.0:
            drafter.busy_until = max(
                drafter.busy_until, now + drafter.latency(assignment.window.depth)
            )
        else:
            drafter.busy_until = math.inf

    def _assign(self, sequence: Sequence, drafter: Drafter) -> Assignment:
        limit = sequence.max_draft_tokens
        reach = min(_AHEAD * limit + 1, drafter.hello.max_draft_tokens)
        trie = Trie(
            len(sequence.tokens), Window(token_count=_TOKENS_PER_DEPTH * reach, depth=reach)
        )
        rule = how_to_propose(
            sequence.request, drafter.hello.distributions, self._trust_distributions
        )
        kind = _kind(sequence)
        learned = drafter.rates.get(kind)
        if learned is None:
            learned = drafter.rates[kind] = AcceptanceRate(
                _OPTIMISM, _KNOWN_POSITIONS, decay=_LONG_MEMORY
            )
        rate = AcceptanceRate(learned, limit)
        return Assignment(drafter, trie, rule, rate, learned, trie.window, 1, len(sequence.tokens))

    def close(self, sequence: Sequence) -> None:
        """Tell its drafters that the sequence is over."""
        for assignment in sequence.assignments.values():
            assignment.drafter.sequence_ids.discard(sequence.id)
            if assignment.opened:
                assignment.drafter.outbox.closed.append(Closed(sequence.id, CloseReason.ENDED))
        sequence.assignments.clear()

    # --- drafts and verdicts ---

    def on_drafts(
        self,
        drafter: Drafter,
        batch: DraftBatch,
        byte_count: int = 0,
        arrived_at: float | None = None,
    ) -> None:
        """Hang proposals into the tries; a drafter that breaks the protocol loses its stream, and no one else notices.

        `arrived_at` is when they came (monotonic seconds; None is now), which may be a forward ago. Were that forward counted as
        the drafter's time, one answer that came just too late would make it seem too slow to be waited for, and so all after it.
        """
        at = self._clock() if arrived_at is None else arrived_at
        drafter.busy_until = at if drafter.busy_until == math.inf else max(drafter.busy_until, at)
        drafter.taken_bytes += byte_count + MESSAGE_BYTES
        if self.roster.connected.get(drafter.id) is not drafter:
            return
        self._metrics.received(drafter, byte_count)
        answers = _Answers()
        try:
            for proposal in batch.proposals:
                self._take_proposal(drafter, proposal, at, answers)
            for skip in batch.skips:
                self._take_skip(drafter, skip, at, answers)
        except OutriderError as error:
            self.reject(drafter, error)
        except (
            Exception
        ):  # logged; a fault that a drafter's message brings to light costs that drafter's stream
            log.exception("what drafter %s said could not be taken in", drafter.id)
            self.reject(
                drafter,
                OutriderError(
                    Reason.INTERNAL,
                    "the drafts could not be taken in; the verifier's log has the reason",
                ),
            )
        self._metrics.proposed(drafter, answers.token_count, answers.stale_count, answers.cut_count)
        self._metrics.answered(drafter, answers.drafts_s)
        answers.teach(drafter)

    def _take_proposal(
        self, drafter: Drafter, proposal: Proposal, at: float, answers: _Answers
    ) -> None:
        found = self._assignment(drafter, proposal.sequence_id, "proposal.sequence_id")
        count = len(proposal.token_ids)
        answers.token_count += count
        answers.draft_s = max(answers.draft_s, proposal.draft_seconds)
        if found is None:
            answers.stale_count += count
            return
        sequence, assignment = found
        added = assignment.trie.add(proposal, sequence.tokens)
        answers.stale_count += added.stale
        answers.cut_count += added.cut
        seconds = assignment.answered(at, proposal.base_length, drafted=True)
        if seconds is not None:
            answers.drafts_s.append(seconds)
            self._learn_late(assignment, proposal, added)
            # What was in the trie already was drafted and told before.
            answers.draft_length = max(answers.draft_length, count - added.merged)

    def _learn_late(self, assignment: Assignment, proposal: Proposal, added: Added) -> None:
        """Judge a chain that came too late to be verified by what was committed meanwhile."""
        contradicted = added.stale > 0
        # A drafter that is asked has heard of these tokens meanwhile, so that right ones alone prove nothing.
        if not proposal.parents and (contradicted or not assignment.asked):
            assignment.learn(added.passed + contradicted, added.passed)

    def _take_skip(self, drafter: Drafter, skip: Skip, at: float, answers: _Answers) -> None:
        found = self._assignment(drafter, skip.sequence_id, "skip.sequence_id")
        if found is None:
            return
        sequence, assignment = found
        assignment.trie.skip(skip, sequence.tokens)
        seconds = assignment.answered(at, skip.base_length, drafted=False)
        if seconds is not None:
            answers.skips_s.append(seconds)

    def ignore(self, drafter: Drafter, byte_count: int) -> None:
        """A message came of a kind that only a later version knows."""
        drafter.taken_bytes += byte_count + MESSAGE_BYTES
        self._metrics.ignored(drafter)

    def _assignment(
        self, drafter: Drafter, sequence_id: int, field_name: str
    ) -> tuple[Sequence, Assignment] | None:
        """None for a sequence that is over, or in other hands by now: a late message looks the same, so it is counted and ignored.

        Raises OutriderError(PROTOCOL_VIOLATION) for one that the drafter cannot have been handed yet, which no delay explains.
        """
        if sequence_id > drafter.last_sequence_id:
            message = f"{field_name} must be one that was opened, at most {drafter.last_sequence_id}, not {sequence_id}"
            raise OutriderError(Reason.PROTOCOL_VIOLATION, message, field_name)
        sequence = self._sequences.get(sequence_id)
        assignment = sequence.assignments.get(drafter.id) if sequence is not None else None
        return (
            (sequence, assignment)
            if sequence is not None and assignment is not None and assignment.opened
            else None
        )

    def send_verdicts(
        self, sequence: Sequence, new_token_ids: list[int], verified: Assignment | None, span: Span
    ) -> None:
        """Move every trie's root along the committed tokens and tell the drafters that the plan asks.

        `verified` is whose draft the step verified; `span` is the step's.
        """
        found: list[str] = []
        for assignment in sequence.assignments.values():
            trie, drafter = assignment.trie, assignment.drafter
            guessed = 0 if assignment is verified else trie.length(len(new_token_ids))
            skipped = trie.node_count == 0 and trie.ready(1)
            walk = trie.advance(new_token_ids)
            if assignment.asked and not skipped:
                self._metrics.walked(drafter, walk)
                if span.traceparent:
                    found.append(f"{drafter.id}: {walk.result.value}, {walk.wasted} wasted")
            if guessed:
                # Guesses that the step did not verify, a probe's among them: the commit tells whether they were right.
                assignment.learn(guessed, min(walk.matched, guessed))
            if (wanted := self._wanted(sequence, assignment)) or assignment in self.plan.probes:
                self._ask(sequence, assignment, wanted, walk.matched, span.traceparent)
            else:
                assignment.asked = False
        if found:
            span.set(outrider__lookups="; ".join(found))

    def _wanted(self, sequence: Sequence, assignment: Assignment) -> int:
        """Draft tokens that the plan asks of a drafter; 0 if it does not ask."""
        if sequence.id in self.plan.planned_ids:
            return self.plan.asks.get(assignment, 0)
        # It was admitted, or got this drafter, since the step was planned.
        return assignment.draft_tokens if assignment.asked else 0

    def _ask(
        self,
        sequence: Sequence,
        assignment: Assignment,
        wanted: int,
        accepted: int,
        traceparent: str,
    ) -> None:
        """Send the verdict of a step, after the trie was advanced, with all that the drafter missed. 0 tokens are a probe."""
        length = len(sequence.tokens)
        # A drafter back from silence has to read first, which is not how long it takes to draft. But a probe is meant to tell.
        was_asked, assignment.asked = assignment.asked, wanted > 0
        if wanted > 0:
            assignment.backoff = FIRST_BACKOFF
        else:
            assignment.back_off()
        assignment.draft_tokens = max(1, wanted)
        if not assignment.opened:
            self._open(sequence, assignment, wanted)
            return
        told, assignment.told_length = sequence.tokens[assignment.told_length :], length
        window = self._window(assignment, wanted)
        changed = window is not assignment.window
        assignment.window = window
        self._told(assignment)
        verdict = Verdict(
            sequence.id,
            length,
            told,
            accepted,
            assignment.draft_tokens,
            window if changed else None,
            traceparent,
        )
        assignment.drafter.outbox.verdicts.append(verdict)
        if (
            assignment.answered_length > 0
            and assignment.trie.node_count == 0
            and (was_asked or wanted == 0)
        ):
            assignment.timed(length)

    def _window(self, assignment: Assignment, draft_tokens: int) -> Window:
        """How far to run ahead: a draft for each step until the drafter hears of this one, as far as the trie has room.

        A probe (0 tokens) is a single token. A drafter on the target's cores does not run ahead: it would slow down the forward.
        """
        drafter, step_s, most = assignment.drafter, self.plan.decode_step_s, assignment.trie.window
        if draft_tokens == 0 or drafter.on_target_cores:
            reach = token_count = max(draft_tokens, 1)
        else:
            steps = MAX_DRAFT_TOKENS
            if step_s > 0.0:
                steps = 1 + math.ceil(drafter.round_trip.value / step_s)
            reach = min((1 + steps) * (1 + draft_tokens) - 1, most.depth)
            token_count = min(_TOKENS_PER_DEPTH * reach, most.token_count)
        before = assignment.window
        return (
            before
            if (before.depth, before.token_count) == (reach, token_count)
            else Window(token_count, reach)
        )

    def record_acceptance(self, assignment: Assignment, drafted: int, accepted: int) -> None:
        """Let the outcome of a verified draft teach the rates and the metrics."""
        drafter = assignment.drafter
        assignment.learn(drafted, accepted)
        drafter.verified_count += drafted
        drafter.accepted_count += accepted
        self._metrics.verified(drafter, drafted, accepted)


def _kind(sequence: Sequence) -> tuple[bool, bool, bool]:
    """Traffic that drafters should be as good at as they were before: greedy or not, under a grammar, with a prediction."""
    request = sequence.request
    return request.sampling.greedy, request.grammar is not None, bool(request.prediction)
