"""Which tokens of which sequences go into the next forward: continuous batching with chunked prefill, drafts and preemption.

Knows sequences and pages; not the model, the acceptance rule or any stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from outrider.lm.pages import PagePool
from verifier_svc.state.scheduled_sequence import _NOTHING, NO_PATH, ScheduledSequence
from verifier_svc.state.sequence import Assignment, Sequence
from verifier_svc.state.trie import Path

# Of a step's tokens, what drafts leave to prompts: else deep drafts of a few requests would keep all others from beginning.
_PROMPTS_SHARE = 0.25


class Scheduler:
    """First come, first served; decoding goes before prefill, and the youngest sequence is preempted when pages run out."""

    def __init__(
        self, pool: PagePool, *, max_batch_tokens: int, max_sequences: int, max_scored_tokens: int
    ) -> None:
        """`max_scored_tokens` bounds the prompts' tokens that a step scores, since each takes a row of logits."""
        self.pool = pool
        self.running: dict[int, Sequence] = {}
        self.waiting: deque[Sequence] = deque()
        self.preemption_count = 0
        # Of texts that were admitted, and how many of those were found in the prefix cache.
        self.prompt_token_count = 0
        self.cached_token_count = 0
        self._max_batch_tokens = max_batch_tokens
        self._max_sequences = max_sequences
        self._max_scored_tokens = max_scored_tokens

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence and free its pages."""
        if self.running.pop(sequence.id, None) is None and sequence in self.waiting:
            self.waiting.remove(sequence)
        self.pool.free(sequence.kv)

    def next(self, draft_tokens: Mapping[int, int]) -> list[ScheduledSequence]:
        """The next batch of what was admitted, empty when there is nothing to do.

        `draft_tokens` says how many tokens a sequence's draft may have, by its id.
        """
        batch: dict[int, ScheduledSequence] = {}
        budget = self._max_batch_tokens
        # A step always has room for every decoding sequence's one token; drafts and prompts share what is left.
        running = [
            (sequence, len(sequence.tokens) - sequence.kv.num_computed_tokens)
            for sequence in self.running.values()
        ]
        decoding = [pair for pair in running if pair[1] == 1]
        prefilling = [pair for pair in running if pair[1] > 1]
        spare, rows = max(0, budget - len(decoding)), self._max_scored_tokens
        kept = min(sum(pending for _, pending in prefilling), int(budget * _PROMPTS_SHARE))
        for sequence, pending in decoding + prefilling:
            count = _takes(sequence, pending, rows) if sequence.unscored else pending
            if pending > 1:
                count = min(count, spare)
            if count == 0:
                continue
            spare -= count if count > 1 else 0
            planned = draft_tokens.get(sequence.id, 0)
            room = max(0, spare - kept) if pending == 1 else spare
            scheduled = self._schedule(sequence, count, pending, min(planned, room), batch)
            if scheduled is not None:
                scheduled.planned_draft_tokens = planned
                spare -= len(scheduled.path.token_ids)
                rows -= len(scheduled.scored)
        return list(batch.values())

    def _schedule(
        self,
        sequence: Sequence,
        count: int,
        pending: int,
        most: int,
        batch: dict[int, ScheduledSequence],
    ) -> ScheduledSequence | None:
        """Put `count` pending tokens of the sequence, and a draft of at most `most` behind the last of them, into the batch.

        None if it had to be preempted.
        """
        if sequence.id not in self.running:
            return None  # preempted for an older one in this very step
        samples = count == pending
        assignment, path = best_path(sequence, most) if samples else (None, NO_PATH)
        start = sequence.kv.num_computed_tokens
        end = start + count + len(path.token_ids)
        reserved = self.pool.reserve(sequence.kv, end)
        if not reserved and path.token_ids:
            assignment, path, end = None, NO_PATH, start + count
        while not reserved and not self.pool.reserve(sequence.kv, end):
            victim = next(
                (other for other in reversed(self.running.values()) if other.id not in batch),
                sequence,
            )
            self._preempt(victim)
            if victim is sequence:
                return None
        scored = _scored(sequence, start, count) if sequence.unscored else _NOTHING
        tokens = sequence.tokens[start : start + count]
        scheduled = ScheduledSequence(
            sequence, start, tokens, path, assignment, samples, scored=scored
        )
        batch[sequence.id] = scheduled
        return scheduled

    def admit(self) -> list[Sequence]:
        """Move waiting sequences in, those returned, while their whole text fits: so that none preempts another at once."""
        admitted: list[Sequence] = []
        while self.waiting and len(self.running) < self._max_sequences:
            sequence = self.waiting[0]
            # The logits before a token that is to be scored are not in the cache.
            limit = sequence.unscored.start - 1 if sequence.unscored else None
            cached = self.pool.match_prefix(
                sequence.kv, sequence.tokens, sequence.request.tenant, limit
            )
            if not self.pool.reserve(sequence.kv, len(sequence.tokens)):
                self.pool.free(sequence.kv)
                break
            self.prompt_token_count += len(sequence.tokens)
            self.cached_token_count += cached
            if sequence.stats.forward_count == 0:
                sequence.cached_token_count = cached
            self.running[sequence.id] = self.waiting.popleft()
            sequence.admitted = True
            admitted.append(sequence)
        return admitted

    def _preempt(self, victim: Sequence) -> None:
        """Free its pages and recompute it later; its committed tokens and its drafters' tries stay as they are."""
        self.pool.free(victim.kv)
        del self.running[victim.id]
        self.waiting.appendleft(victim)
        self.preemption_count += 1


def _takes(sequence: Sequence, pending: int, rows: int) -> int:
    """How many of its pending tokens a step can take that has `rows` rows of logits for scoring prompts."""
    unscored = sequence.unscored
    if len(unscored) <= rows:
        return pending
    return unscored.start - 1 + rows - sequence.kv.num_computed_tokens


def _scored(sequence: Sequence, start: int, count: int) -> range:
    """The unscored tokens of its prompt that follow one of the `count` tokens from position `start` on."""
    unscored = sequence.unscored
    return range(unscored.start, min(unscored.stop, start + count + 1))


def best_path(sequence: Sequence, draft_tokens: int) -> tuple[Assignment | None, Path]:
    """The path of at most so many tokens from which the most are expected, by its length and its drafter's acceptance."""
    if draft_tokens <= 0:
        return None, NO_PATH
    found = [
        (assignment, length)
        for assignment in sequence.assignments.values()
        if (length := assignment.trie.length(draft_tokens))
    ]
    if not found:
        return None, NO_PATH
    best, _ = (
        found[0]
        if len(found) == 1
        else max(found, key=lambda pair: pair[0].rate.expected_tokens(pair[1]))
    )
    return best, best.trie.path(draft_tokens)
