"""Takes a drafter's messages, and records what became of its drafts."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from outrider.errors import OutriderError, Reason
from outrider.protocol.draft_messages import DraftBatch, Proposal, Skip
from outrider.protocol.token_tree import main_path
from verifier_svc.metrics import VerifierMetrics
from verifier_svc.state.drafter import Drafter
from verifier_svc.state.sequence import Assignment, Sequence
from verifier_svc.state.trie import DraftTree


@dataclass(slots=True)
class DraftMessage:
    """One message of a drafter, with its counts and latencies.

    A message is one measurement of the drafter's latency. If each of its proposals counted, one
    slow round of a large batch would displace all earlier measurements.
    """

    drafter: Drafter
    arrived_at: float
    """Monotonic seconds."""
    sequences: dict[int, Sequence]
    """The engine's sequences, keyed by id."""
    draft_latencies_s: list[float] = field(default_factory=list)
    """For each draft that answers a timed verdict, the seconds since the drafter was asked."""
    skip_latencies_s: list[float] = field(default_factory=list)
    """For each skip that answers a timed verdict, the seconds since the drafter was asked."""
    draft_s: float = 0.0
    """The longest drafting time that a proposal of the message states (seconds). The times are not
    added up, because a drafter mostly drafts a message's proposals together."""
    draft_length: int = 0
    """The number of tokens of the longest new draft, which determines the drafting time."""
    token_count: int = 0
    stale_count: int = 0
    cut_count: int = 0

    def take(self, batch: DraftBatch) -> None:
        """Add all proposals to the tries, and note the skips.

        Raises OutriderError(PROTOCOL_VIOLATION) for a sequence id or base length that even a late
        message could not have, and for more entries than the messages to the drafter allow.
        """
        self.drafter.count_entries(batch)
        for i, proposal in enumerate(batch.proposals):
            try:
                self._take_proposal(proposal)
            except OutriderError as error:
                raise error.within(f"drafts.proposals[{i}]") from None
        for i, skip in enumerate(batch.skips):
            try:
                self._take_skip(skip)
            except OutriderError as error:
                raise error.within(f"drafts.skips[{i}]") from None

    def update_latencies(self) -> None:
        """Add this message to the drafter's measured latencies."""
        latencies_s = [*self.draft_latencies_s, *self.skip_latencies_s]
        if latencies_s:
            self.drafter.round_trip.observe(max(max(latencies_s) - self.draft_s, 0.0))
        if self.draft_length and self.draft_s > 0.0:
            self.drafter.token_time.observe(self.draft_s / self.draft_length)

    def _take_proposal(self, proposal: Proposal) -> None:
        found = self._find(proposal.sequence_id)
        count = len(proposal.token_ids)
        self.token_count += count
        self.draft_s = max(self.draft_s, proposal.draft_seconds)
        if found is None:
            self.stale_count += count
            return
        sequence, assignment = found
        added = assignment.trie.add(proposal, sequence.tokens)
        self.stale_count += added.stale
        self.cut_count += added.cut
        latency_s = assignment.on_answer(self.arrived_at, proposal.base_length, drafted=True)
        if latency_s is not None:
            self.draft_latencies_s.append(latency_s)
            _observe_late_draft(assignment, proposal, sequence.tokens)
            # Tokens that were already in the trie belong to an earlier draft.
            length = count - added.merged
            if proposal.parents:
                length = min(length, _new_depth(proposal.parents, added.merged))
            self.draft_length = max(self.draft_length, length)

    def _take_skip(self, skip: Skip) -> None:
        found = self._find(skip.sequence_id)
        if found is None:
            return
        sequence, assignment = found
        assignment.trie.skip(skip, sequence.tokens)
        latency_s = assignment.on_answer(self.arrived_at, skip.base_length, drafted=False)
        if latency_s is not None:
            self.skip_latencies_s.append(latency_s)

    def _find(self, sequence_id: int) -> tuple[Sequence, Assignment] | None:
        """Return the sequence and its assignment to this drafter.

        Return None if the sequence is over or is not open at this drafter: the message may just be
        late.
        Raises OutriderError(PROTOCOL_VIOLATION) for an id above all ids announced to the drafter.
        """
        last = self.drafter.last_sequence_id
        if sequence_id > last:
            message = f"sequence_id must be one that was opened, at most {last}, not {sequence_id}"
            raise OutriderError(Reason.PROTOCOL_VIOLATION, message, "sequence_id")
        sequence = self.sequences.get(sequence_id)
        if sequence is None:
            return None
        assignment = sequence.assignments.get(self.drafter.id)
        if assignment is None or not assignment.opened:
            return None
        return sequence, assignment


def _new_depth(parents: list[int], merged: int) -> int:
    """Return how many tokens deep a tree's new part is.

    The depth is counted from the end of that part of the main path that an earlier draft had. It
    stands for the drafting time, because branches are drafted side by side. `merged` tokens of the
    tree belong to an earlier draft.
    """
    repeated = min(merged, len(main_path(parents)))
    depths = [0] * (1 + repeated)
    for parent in parents[repeated:]:
        depths.append(depths[parent] + 1)
    return max(depths)


def _observe_late_draft(assignment: Assignment, proposal: Proposal, committed: list[int]) -> None:
    """Compare the main path of a draft that came too late with the tokens committed meanwhile."""
    since = committed[proposal.base_length :]
    if not since:
        return
    guessed = proposal.token_ids
    if proposal.parents:
        guessed = [guessed[row - 1] for row in main_path(proposal.parents)]
    right = 0
    while right < min(len(guessed), len(since)) and guessed[right] == since[right]:
        right += 1
    contradicted = right < min(len(guessed), len(since))
    # The verifier has meanwhile sent these tokens to every drafter that it asks, so a right guess
    # may be a copy. For such a drafter only a wrong guess is evidence.
    if contradicted or not assignment.asked:
        assignment.observe_acceptance(right + contradicted, right)
    if contradicted:
        assignment.set_run(0)


@dataclass(slots=True)
class JudgedDraft:
    """A verified draft, whose `rows` were accepted; `judge_draft` makes it.

    The object is kept until `record` is called. Meanwhile the sequence goes on, and drafters may
    leave it.
    """

    assignment: Assignment
    """The assignment that the main path comes from."""
    draft: DraftTree
    rows: SequenceOf[int]
    drafted: int
    """The number of tokens of the assignment's own main path."""
    accepted: int
    """How many tokens at the start of that path were accepted."""
    run: int
    """`Assignment.run` before the draft."""
    drafters: dict[str, Drafter]
    """The sequence's drafters, keyed by id; empty for a chain of one drafter."""

    def record(self, metrics: VerifierMetrics, emitted: int) -> None:
        """Count the draft in acceptance rates and metrics; the step committed `emitted` tokens.

        The rate of an assignment counts only its main guesses. `observe_siblings` measures the
        other guesses by the committed tokens, whether a step verified them or not.
        """
        self.assignment.observe_rates(self.drafted, self.accepted, self.run)
        if self.drafters:
            self._record_tree(metrics, emitted)
            return
        drafter = self.assignment.drafter
        drafter.verified_count += self.drafted
        drafter.accepted_count += self.accepted
        metrics.verified(drafter, self.drafted, self.accepted, emitted)

    def _record_tree(self, metrics: VerifierMetrics, emitted: int) -> None:
        draft, rows = self.draft, self.rows
        own_id = self.assignment.drafter.id
        for drafter_id, (drafted, places) in outcomes_by_drafter(draft, own_id, rows).items():
            drafter = self.drafters[drafter_id]
            drafter.verified_count += drafted
            drafter.accepted_count += len(places)
            metrics.verified_in_tree(drafter, drafted, places, leads=drafter_id == own_id)
        on_main_path = main_path_count(rows[: draft.main_length])
        branched = bool(draft.parents)
        metrics.verified_draft(
            len(draft.token_ids), on_main_path, len(rows), emitted, branched=branched
        )


def judge_draft(
    sequence: Sequence, assignment: Assignment, draft: DraftTree, rows: SequenceOf[int]
) -> JudgedDraft:
    """Judge a verified draft, whose `rows` were accepted, before its drafters get the verdict.

    The main path comes from `assignment`.
    """
    drafted, accepted = len(draft.token_ids), len(rows)
    drafters: dict[str, Drafter] = {}
    if draft.parents or draft.drafter_ids or draft.main_length is not None:
        drafted, accepted = main_path_outcome(draft, assignment.drafter.id, rows)
        drafters = {name: each.drafter for name, each in sequence.assignments.items()}
    assignment.judge(drafted, accepted)
    return JudgedDraft(assignment, draft, rows, drafted, accepted, assignment.run, drafters)


def main_path_outcome(draft: DraftTree, drafter_id: str, rows: SequenceOf[int]) -> tuple[int, int]:
    """Return the length of a drafter's own main path in a tree, and how much of it was accepted.

    The path ends where another drafter's guess continues it. `rows` are the accepted rows.
    """
    drafted = 0
    while drafted < len(draft.token_ids) and drafted != draft.main_length:
        if draft.parents and draft.parents[drafted] != drafted:
            break
        if draft.drafter_ids and draft.drafter_ids[drafted] != drafter_id:
            break
        drafted += 1
    return drafted, main_path_count(rows[:drafted])


def main_path_count(rows: SequenceOf[int]) -> int:
    """Return how many of the accepted rows are on the main path, which has a draft's first rows."""
    return sum([row == place for place, row in enumerate(rows, 1)])


def outcomes_by_drafter(
    draft: DraftTree, drafter_id: str, rows: SequenceOf[int]
) -> dict[str, tuple[int, list[int]]]:
    """Return each drafter's token count in a tree, and the places of its accepted tokens.

    A place is a token's index in the accepted path.
    If the tree names no drafters, all its tokens are `drafter_id`'s. `rows` are the accepted rows.
    """
    found: dict[str, tuple[int, list[int]]] = {}
    owners = draft.drafter_ids or [drafter_id] * len(draft.token_ids)
    for owner in owners:
        count, places = found.get(owner, (0, []))
        found[owner] = (count + 1, places)
    for place, row in enumerate(rows):
        found[owners[row - 1]][1].append(place)
    return found
