"""Chooses the tokens of the next forward: continuous batching, chunked prefill, preemption.

Knows sequences and pages; not the model, the acceptance rule or any stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from outrider.lm.pages import PagePool
from outrider.token_tree import favourite_path
from verifier_svc.engine.fair_queue import FairQueue
from verifier_svc.engine.load_meter import LoadMeter
from verifier_svc.policy.draft_trees import ChosenDraft, best_chain
from verifier_svc.state.draft_tree import NO_DRAFT
from verifier_svc.state.scheduled_sequence import ScheduledSequence
from verifier_svc.state.sequence import Sequence

if TYPE_CHECKING:
    from verifier_svc.engine.target import Limits  # imports torch, which the metrics do not need

# Share of a step's tokens that drafts leave to prompts. Without it the deep drafts of a few
# requests would keep all other requests from beginning.
_PROMPTS_SHARE = 0.25
_LOGIT_BYTES = 4
_NO_DRAFT: ChosenDraft = (None, NO_DRAFT)
_NO_TREES: Mapping[int, ChosenDraft] = {}


class Scheduler:
    """Serves tenants in turn, each in order of arrival, and decodes before it prefills.

    When pages run out, it preempts the youngest sequence.
    """

    def __init__(self, pool: PagePool, limits: Limits, vocab_size: int) -> None:
        self.pool = pool
        self.running: dict[int, Sequence] = {}
        self.waiting = FairQueue()
        self.load_meter = LoadMeter(
            self.running, self.waiting, limits.max_sequences, limits.max_waiting
        )
        self.preemption_count = 0
        self.prompt_token_count = 0
        """Tokens of all admitted sequences."""
        self.cached_token_count = 0
        """How many of those the prefix cache held."""
        self._max_batch_tokens = limits.max_batch_tokens
        self._max_sequences = limits.max_sequences
        # Each scored token of a prompt takes a row of logits.
        self._max_scored_tokens = max(1, limits.scored_logits_bytes // (_LOGIT_BYTES * vocab_size))

    def add(self, sequence: Sequence) -> None:
        """Put a sequence into the queue."""
        self.waiting.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence and free its pages."""
        if self.running.pop(sequence.id, None) is None:
            self.waiting.remove(sequence)
        self.pool.free(sequence.kv)

    def next(
        self, draft_tokens: Mapping[int, int], trees: Mapping[int, ChosenDraft] = _NO_TREES
    ) -> list[ScheduledSequence]:
        """Build the next batch from the admitted sequences; empty when there is nothing to do.

        A sequence has its draft of `trees`, else its best chain of at most `draft_tokens`, both by
        sequence id.
        """
        batch: dict[int, ScheduledSequence] = {}
        pairs = [(sequence, sequence.num_uncomputed_tokens) for sequence in self.running.values()]
        decoding = [pair for pair in pairs if pair[1] == 1]
        prefilling = [pair for pair in pairs if pair[1] > 1]
        # Every decoding sequence has room for its one token. Drafts and prompts share the rest.
        spare = max(0, self._max_batch_tokens - len(decoding))
        rows = self._max_scored_tokens
        for_prompts = self._for_prompts(sum([pending for _, pending in prefilling]))
        for sequence, pending in decoding + prefilling:
            count = _scorable(sequence, pending, rows) if sequence.unscored else pending
            if pending > 1:
                count = min(count, spare)
                spare -= count
            if count == 0:
                continue
            planned = draft_tokens.get(sequence.id, 0)
            room = max(0, spare - for_prompts) if pending == 1 else spare
            samples = count == pending
            draft = _NO_DRAFT
            if samples:
                draft = trees.get(sequence.id) or best_chain(sequence, min(planned, room))
            scheduled = self._schedule(sequence, count, samples, room, draft, batch)
            if scheduled is not None:
                scheduled.planned_draft_tokens = planned
                spare -= len(scheduled.draft.token_ids)
                rows -= len(scheduled.scored)
        return list(batch.values())

    def draft_room(self) -> int:
        """Most draft tokens of all decoding sequences together in the next batch."""
        pending = [sequence.num_uncomputed_tokens for sequence in self.running.values()]
        decoding = pending.count(1)
        return max(
            0, self._max_batch_tokens - decoding - self._for_prompts(sum(pending) - decoding)
        )

    def _for_prompts(self, pending: int) -> int:
        """Tokens of a batch that drafts leave to prompts; `pending` tokens of prompts are left."""
        return min(pending, int(self._max_batch_tokens * _PROMPTS_SHARE))

    def _schedule(
        self,
        sequence: Sequence,
        count: int,
        samples: bool,
        room: int,
        chosen: ChosenDraft,
        batch: dict[int, ScheduledSequence],
    ) -> ScheduledSequence | None:
        """Add `count` of the sequence's tokens to the batch, and a draft behind the last.

        The draft has at most `room` tokens. Returns None if the sequence was preempted.
        """
        if sequence.id not in self.running:
            return None  # this step preempted it for an older one
        assignment, draft = chosen
        draft = draft.first(room)
        if not draft.token_ids:
            assignment = None
        start = sequence.kv.num_computed_tokens
        end = start + count
        has_room = self.pool.reserve(sequence.kv, end + len(draft.token_ids))
        if not has_room and draft.parents:
            # The favourite path alone may fit.
            draft = draft.first(len(favourite_path(draft.parents)))
            has_room = self.pool.reserve(sequence.kv, end + len(draft.token_ids))
        if not has_room and draft.token_ids:
            # A draft is no reason to preempt another sequence.
            assignment, draft = _NO_DRAFT
        while not has_room and not self.pool.reserve(sequence.kv, end):
            others = (other for other in reversed(self.running.values()) if other.id not in batch)
            victim = next(others, sequence)
            self._preempt(victim)
            if victim is sequence:
                return None
        tokens = sequence.tokens[start : start + count]
        scored = _scored(sequence, start, count)
        scheduled = ScheduledSequence(
            sequence, start, tokens, draft, assignment, samples, scored=scored
        )
        batch[sequence.id] = scheduled
        return scheduled

    def admit(self) -> list[Sequence]:
        """Admit waiting sequences while all their tokens fit, and return them.

        A sequence with all its pages at hand does not preempt another one at once.
        """
        admitted: list[Sequence] = []
        while self.waiting and len(self.running) < self._max_sequences:
            sequence = self.waiting.first(self.running.values())
            # Scoring a token needs the logits before it, which the cache does not hold.
            limit = sequence.unscored.start - 1 if sequence.unscored else None
            tenant = sequence.request.tenant
            cached = self.pool.match_prefix(sequence.kv, sequence.tokens, tenant, limit)
            if not self.pool.reserve(sequence.kv, len(sequence.tokens)):
                self.pool.free(sequence.kv)
                break
            self.prompt_token_count += len(sequence.tokens)
            self.cached_token_count += cached
            if sequence.stats.forward_count == 0:
                sequence.cached_token_count = cached
            self.waiting.remove(sequence)
            self.running[sequence.id] = sequence
            sequence.admitted = True
            admitted.append(sequence)
        self.load_meter.admitted()
        return admitted

    def _preempt(self, victim: Sequence) -> None:
        """Free its pages and recompute it later; it keeps its tokens and its drafters' tries."""
        self.pool.free(victim.kv)
        del self.running[victim.id]
        self.waiting.put_back(victim)
        self.preemption_count += 1


def _scorable(sequence: Sequence, pending: int, rows: int) -> int:
    """How many of its pending tokens a step with `rows` logits rows for scoring can take."""
    unscored = sequence.unscored
    if len(unscored) <= rows:
        return pending
    return unscored.start - 1 + rows - sequence.kv.num_computed_tokens


def _scored(sequence: Sequence, start: int, count: int) -> range:
    """The unscored prompt positions that follow one of the `count` tokens from `start` on."""
    unscored = sequence.unscored
    if not unscored:
        return unscored
    return range(unscored.start, min(unscored.stop, start + count + 1))
