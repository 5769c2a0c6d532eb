"""Hands sequences to drafters, takes their drafts, tells them what was committed, and says which drafts are worth a wait."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from outrider.errors import OutriderError
from outrider.messages import Closed, CloseReason, DraftBatch, Hello, StepBatch, Window
from verifier_svc.depth import AcceptanceRate, ForwardCost, expected_tokens, speculation_pays, wait_budget_s
from verifier_svc.drafters import Drafter, Roster
from verifier_svc.metrics import Metrics
from verifier_svc.sequence import Assignment, Pause, Sequence
from verifier_svc.trie import Fate, Trie
from verifier_svc.trust import how_to_propose

log = logging.getLogger(__name__)

# A drafter may have twice the verified depth under way: the path being verified, its bonus token, and the path behind that.
_AHEAD = 2
_NODES_PER_DEPTH = 4
# What is believed of a drafter before it was tried on a sequence. Hopeful, because what is believed bad is never tried.
_OPTIMISM = 0.8
# A probe may cost as much time as this many plain steps.
_PROBE_STEPS = 2
# For a draft that is waited for whether it pays or not; its drafter may be gone without a word.
_LONGEST_WAIT_S = 1.0


class Drafting:
    """The engine's side of all draft streams; used on the engine's thread alone."""

    def __init__(
        self,
        sequences: dict[int, Sequence],
        cost: ForwardCost,
        metrics: Metrics,
        *,
        trust_distributions: bool = False,
        always: bool = False,
    ) -> None:
        """With `always` every draft is waited for and none is paused, whether that pays or not."""
        self.roster = Roster()
        self.rejections: list[tuple[Drafter, OutriderError]] = []
        self._sequences = sequences
        self._cost = cost
        self._metrics = metrics
        self._trust_distributions = trust_distributions
        self._always = always

    # --- drafters come and go ---

    def join(self, hello: Hello, sink: Callable[[StepBatch | OutriderError], None]) -> Drafter:
        """Register a drafter and hand it the sequences that lack one of its family; raises as `Roster.join`."""
        drafter = Drafter(hello, sink)
        self.roster.join(drafter)
        for sequence in self._sequences.values():
            self.hand_out(sequence)
        return drafter

    def leave(self, drafter: Drafter) -> None:
        """Its stream is over: drop its tries and hand its sequences to others."""
        orphans = [self._sequences[i] for i in drafter.sequence_ids if i in self._sequences]
        self.roster.leave(drafter)
        for sequence in orphans:
            sequence.assignments.pop(drafter.id, None)
            self.hand_out(sequence)

    def drain(self, drafter: Drafter) -> None:
        """It is about to leave: hand it no more sequences."""
        drafter.draining = True

    def reject(self, drafter: Drafter, error: OutriderError) -> None:
        """Count a protocol violation and end the drafter's stream with the reason; its sequences go to others."""
        log.warning("drafter %s: %s", drafter.id, error)
        self.roster.fault(drafter)
        self.rejections.append((drafter, error))
        self.leave(drafter)

    # --- sequences come and go ---

    def hand_out(self, sequence: Sequence) -> None:
        """Announce the sequence to the drafters it lacks."""
        if sequence.depth == 0:
            return
        for drafter in self.roster.choose(sequence.request.speculation, sequence.assignments):
            depth = min(_AHEAD * sequence.depth + 1, drafter.hello.max_depth)
            rule = how_to_propose(sequence.request, drafter.hello.distributions, self._trust_distributions)
            trie = Trie(Window(node_count=_NODES_PER_DEPTH * depth, depth=depth))
            assignment = Assignment(drafter, trie, rule, AcceptanceRate(_OPTIMISM))
            sequence.assignments[drafter.id] = assignment
            drafter.sequence_ids.add(sequence.id)
            drafter.outbox.opened.append(sequence.opened_for(assignment))
            assignment.begin_epoch()

    def close(self, sequence: Sequence) -> None:
        """Tell its drafters that the sequence is over."""
        for assignment in sequence.assignments.values():
            assignment.drafter.sequence_ids.discard(sequence.id)
            assignment.drafter.outbox.closed.append(Closed(sequence.id, CloseReason.ENDED))
        sequence.assignments.clear()

    # --- drafts and verdicts ---

    def take(self, drafter: Drafter, batch: DraftBatch, byte_count: int = 0) -> None:
        """Hang proposals into the tries; a drafter that breaks the protocol loses its stream, and no one else notices."""
        self._metrics.received(drafter, byte_count)
        if self.roster.connected.get(drafter.id) is not drafter:
            return
        try:
            for proposal in batch.proposals:
                assignment = self._assignment(drafter, proposal.sequence_id)
                fate = assignment.trie.add(proposal) if assignment else Fate.STALE
                self._metrics.proposed(drafter, len(proposal.token_ids), stale=fate is Fate.STALE)
                if assignment:
                    assignment.answered(proposal.epoch)
            for skip in batch.skips:
                if assignment := self._assignment(drafter, skip.sequence_id):
                    assignment.trie.skip(skip)
                    assignment.answered(skip.epoch)
        except OutriderError as error:
            self.reject(drafter, error)

    def _assignment(self, drafter: Drafter, sequence_id: int) -> Assignment | None:
        """None for a sequence that is over or was never handed out; a late message looks the same, so it is counted and ignored."""
        sequence = self._sequences.get(sequence_id)
        return sequence.assignments.get(drafter.id) if sequence is not None else None

    def acknowledge(self, sequence: Sequence, new_token_ids: list[int], traceparent: str) -> None:
        """Move every trie's root along the committed tokens and tell its drafter, unless drafting is paused."""
        for assignment in sequence.assignments.values():
            pause, trie = assignment.pause, assignment.trie
            epoch = trie.epoch
            matched = trie.advance(new_token_ids)
            if pause.steps_left > 0:
                if not pause.step(new_token_ids):
                    continue
            elif trie.epoch != epoch and not self._always and not self._pays(sequence, assignment):
                pause.begin(new_token_ids)
                continue
            told = pause.end() or new_token_ids
            assignment.drafter.outbox.verdicts.append(sequence.verdict_for(assignment, told, matched, traceparent))
            if trie.epoch != epoch or trie.node_count == 0:
                assignment.begin_epoch()

    def _pays(self, sequence: Sequence, assignment: Assignment) -> bool:
        """Whether asking this drafter for another draft is worth it, as far as is known."""
        depth = sequence.draft_limit
        plain_s, verify_s = self._cost.estimate(1), self._cost.estimate(1 + depth)
        pays = speculation_pays(assignment.rate.value, depth, plain_s, verify_s, assignment.drafter.latency.value)
        if pays:
            assignment.pause.length = Pause().length
        return pays

    def judge(self, assignment: Assignment, drafted: int, accepted: int) -> None:
        """Let the outcome of a verified draft teach the rates and the metrics."""
        drafter = assignment.drafter
        assignment.rate.observe(drafted, accepted)
        drafter.verified_count += drafted
        drafter.accepted_count += accepted
        self._metrics.verified(drafter, drafted, accepted)

    # --- waiting ---

    def worth_waiting_for(self, running: Iterable[Sequence]) -> tuple[list[Assignment], float]:
        """The drafts under way that may still pay, and until how many seconds after the last step's end they do."""
        late: list[Assignment] = []
        certain, awaited, token_count, plain_count = 0.0, 0.0, 0, 0
        for sequence in running:
            if sequence.pending_count != 1:
                continue
            now, later, slow = _prospects(sequence)
            certain += now
            plain_count += 1
            token_count += 1 + sequence.draft_limit
            if slow is not None:
                awaited += later - now
                late.append(slow)
        if self._always:
            return late, _LONGEST_WAIT_S
        budget_s = wait_budget_s(self._cost.estimate(token_count), certain, awaited)
        worth = [slow for slow in late if slow.drafter.latency.value <= budget_s or slow.pause.probing]
        if any(slow.pause.probing for slow in worth):
            budget_s = max(budget_s, _PROBE_STEPS * self._cost.estimate(plain_count))
        return worth, budget_s


def _prospects(sequence: Sequence) -> tuple[float, float, Assignment | None]:
    """Tokens expected of a step now, tokens expected once the best draft under way is there, and whose that is."""
    depth = sequence.draft_limit
    now, later, slow = 1.0, 1.0, None
    for assignment in sequence.assignments.values():
        there = len(assignment.trie.path(depth).token_ids)
        now = max(now, expected_tokens(assignment.rate.value, there))
        promised = expected_tokens(assignment.rate.value, depth)
        if assignment.pause.steps_left == 0 and not assignment.trie.ready(depth) and promised > later:
            later, slow = promised, assignment
    return (now, later, slow) if later > now else (now, now, None)
