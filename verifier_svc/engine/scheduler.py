"""Chooses the tokens of the next forward: continuous batching, chunked prefill, preemption.

This module works with sequences and pages, not with the model, acceptance rules or streams.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from outrider.lm.pages import KVSequence, PagePool
from outrider.protocol.token_tree import main_path
from verifier_svc.engine.fair_queue import FairQueue
from verifier_svc.engine.load_meter import LoadMeter
from verifier_svc.engine.step_shares import StepParts, StepShares
from verifier_svc.engine.tenant_use import TenantUse
from verifier_svc.policy.draft_trees import ChosenDraft, best_chain
from verifier_svc.policy.forward_cost import ForwardCost
from verifier_svc.state.occupancy import Occupancy
from verifier_svc.state.scheduled_sequence import ScheduledSequence
from verifier_svc.state.sequence import Sequence
from verifier_svc.state.trie import NO_DRAFT, DraftTree
from verifier_svc.verification.grammar_masks import chosen_before

if TYPE_CHECKING:
    from verifier_svc.engine.config import (
        EngineConfig,  # imports torch, which the metrics do not need
    )

# Share of a step's tokens that drafts leave to prompts. Without this share, the deep drafts of a
# few requests would keep all other requests from beginning.
_PROMPTS_SHARE = 0.25
_LOGIT_BYTES = 4
_NO_DRAFT: ChosenDraft = (None, NO_DRAFT)
_NO_TREES: Mapping[int, ChosenDraft] = {}


class Scheduler:
    """Serves tenants in turn, and each tenant's sequences in order of arrival.

    Decoding comes before prompts. Places in the batch, pages and the time of a step are shared
    between tenants (max-min). When places or pages run out, the tenant with the most places or
    pages loses its youngest sequence.
    """

    def __init__(
        self, pool: PagePool, config: EngineConfig, vocab_size: int, cost: ForwardCost
    ) -> None:
        self.pool = pool
        self.running: dict[int, Sequence] = {}
        self.tenants: Counter[str] = Counter()
        """The number of running sequences of each tenant."""
        self.use = TenantUse()
        self._shares = StepShares(cost, self.use, config.max_batch_tokens)
        self.waiting = FairQueue()
        self.unread: dict[int, Sequence] = {}
        """The sequences of `SequenceBook.unread`, which neither run nor wait."""
        self.load_meter = LoadMeter(
            self.running, self.waiting, config.max_sequences, config.max_waiting, cost
        )
        self.preemption_count = 0
        self.prompt_token_count = 0
        """The total number of tokens that sequences had when they were admitted."""
        self.cached_token_count = 0
        """The number of tokens of admitted sequences that the prefix cache held."""
        # The tenant of all sequences of the step in progress; None if they have several tenants.
        self._only_tenant: str | None = None
        self._max_batch_tokens = config.max_batch_tokens
        self._max_sequences = config.max_sequences
        # Each scored token of a prompt takes a row of logits.
        self._max_scored_tokens = max(1, config.scored_logits_bytes // (_LOGIT_BYTES * vocab_size))

    def add(self, sequence: Sequence) -> None:
        """Put a sequence into the queue."""
        self.waiting.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence and free its pages."""
        if sequence.id in self.running:
            self._leave(sequence)
        elif self.unread.pop(sequence.id, None) is None:
            self.waiting.remove(sequence)
        self.pool.free(sequence.kv)

    @property
    def has_work(self) -> bool:
        """True if a sequence runs or waits for a place. An unread sequence does neither."""
        return bool(self.running) or len(self.waiting) > 0

    def _leave(self, sequence: Sequence) -> None:
        """Take a sequence out of the batch."""
        del self.running[sequence.id]
        tenant = sequence.request.tenant
        self.tenants[tenant] -= 1
        if not self.tenants[tenant]:
            del self.tenants[tenant]

    def charge(self, batch: Iterable[ScheduledSequence], seconds: float, now: float) -> None:
        """Charge tenants for a step of `seconds` that ends `now`."""
        rows: dict[str, int] = {}
        if self._only_tenant is not None:
            rows[self._only_tenant] = 1
            batch = ()
        for scheduled in batch:
            tokens = len(scheduled.token_ids) + len(scheduled.draft.token_ids)
            tenant = scheduled.sequence.request.tenant
            rows[tenant] = rows.get(tenant, 0) + tokens
        self.use.charge(rows, seconds, now)

    def occupancy(self) -> Occupancy:
        """Return the present numbers of sequences and pages, and the counts since the start."""
        return Occupancy(
            running=len(self.running),
            waiting=len(self.waiting),
            unread=len(self.unread),
            pages=self.pool.usage,
            prompt_tokens=self.prompt_token_count,
            cached_tokens=self.cached_token_count,
            preemptions=self.preemption_count,
        )

    def in_turn(self) -> Collection[Sequence]:
        """Return the running sequences whose drafts the next step may wait for."""
        free = [each for each in self.running.values() if each.mask_work is None]
        light = self.use.light(self.tenants)
        if not light:
            return free
        return [each for each in free if each.request.tenant in light]

    def ready(self) -> list[Sequence]:
        """Return the running sequences that wait for no mask, and so can be in a step."""
        running = self.running.values()
        return [each for each in running if each.mask_work is None or each.mask_work.done]

    def next(
        self, draft_tokens: Mapping[int, int], trees: Mapping[int, ChosenDraft] = _NO_TREES
    ) -> list[ScheduledSequence]:
        """Build the next batch from the admitted sequences; empty when there is nothing to do.

        `trees` and `draft_tokens` are keyed by sequence id. A sequence that is not in `trees` gets
        its best chain, of at most its `draft_tokens`. A sequence that waited for masks keeps the
        draft for which they were requested.
        """
        batch: dict[int, ScheduledSequence] = {}
        decoding, prefill = self._parts(draft_tokens, trees)
        # Every decoding sequence has room for one token. Drafts and prompts share the other tokens.
        spare = max(0, self._max_batch_tokens - len(decoding))
        for_prompts = self._for_prompts(sum([part.most for part in prefill])) if prefill else 0
        for sequence in decoding:
            planned = draft_tokens.get(sequence.id, 0)
            room = max(0, spare - for_prompts)
            draft = _chosen(sequence, planned, room, trees)
            scheduled = self._schedule(sequence, 1, True, room, draft, batch)
            if scheduled is not None:
                scheduled.planned_draft_tokens = planned
                spare -= len(scheduled.draft.token_ids)
        rows = self._max_scored_tokens
        for sequence, pending, most in prefill:
            count = min(most, _scorable(sequence, pending, rows)) if sequence.unscored else most
            count = min(count, spare)
            if count == 0:
                continue
            spare -= count
            planned = draft_tokens.get(sequence.id, 0)
            samples = count == pending
            draft = _chosen(sequence, planned, spare, trees) if samples else _NO_DRAFT
            scheduled = self._schedule(sequence, count, samples, spare, draft, batch)
            if scheduled is not None:
                scheduled.planned_draft_tokens = planned
                spare -= len(scheduled.draft.token_ids)
                rows -= len(scheduled.scored)
        return list(batch.values())

    def _parts(
        self, draft_tokens: Mapping[int, int], trees: Mapping[int, ChosenDraft]
    ) -> StepParts:
        """Return the running sequences in the step, and how much of each prompt the step reads."""

        def drafted(sequence: Sequence) -> int:
            if sequence.mask_work is not None:
                return len(sequence.mask_work.draft.token_ids)
            tree = trees.get(sequence.id)
            if tree is not None:
                return len(tree[1].token_ids)
            return draft_tokens.get(sequence.id, 0)

        ready = self.ready()
        tenants = self.tenants
        if len(ready) < len(self.running):
            tenants = Counter([each.request.tenant for each in ready])
        self._only_tenant = next(iter(tenants)) if len(tenants) == 1 else None
        if len(tenants) > 1:
            # A tenant with few pages gets new pages before other tenants have used them up.
            held = self._pages_held()
            ready.sort(key=lambda sequence: held[sequence.request.tenant])
        return self._shares.divide(ready, tenants, drafted)

    def draft_room(self) -> int:
        """Return how many draft tokens of all decoding sequences fit in the next batch together."""
        pending = [sequence.num_uncomputed_tokens for sequence in self.ready()]
        decoding = pending.count(1)
        return max(
            0, self._max_batch_tokens - decoding - self._for_prompts(sum(pending) - decoding)
        )

    def _for_prompts(self, pending: int) -> int:
        """Return how many tokens of a batch are kept free of drafts, for prompts.

        The batch could read `pending` tokens of prompts.
        """
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
        """Add `count` of the sequence's tokens to the batch, and a draft after the last token.

        The draft has at most `room` tokens. Returns None if the sequence was preempted instead.
        """
        if sequence.id not in self.running:
            return None  # this step preempted it for another sequence
        assignment, draft = chosen
        start = sequence.kv.num_computed_tokens
        end = start + count
        if draft.token_ids:
            draft = self._with_pages(sequence.kv, end, draft.first(room))
        if not draft.token_ids:
            assignment = None
        if not draft.token_ids and not self._reserve_or_preempt(sequence, end, batch):
            return None
        tokens = sequence.tokens[start : start + count]
        scored = _scored(sequence, start, count)
        scheduled = ScheduledSequence(
            sequence, start, tokens, draft, assignment, samples, scored=scored
        )
        batch[sequence.id] = scheduled
        return scheduled

    def _reserve_or_preempt(
        self, sequence: Sequence, end: int, batch: Mapping[int, ScheduledSequence]
    ) -> bool:
        """Reserve pages for the first `end` tokens of a running sequence.

        Until there are pages, preempt sequences that are not in the batch. Returns False if
        `sequence` itself was preempted.
        """
        while not self.pool.reserve(sequence.kv, end):
            victim = self._page_victim_for_running(batch)
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _page_victim_for_running(self, batch: Mapping[int, ScheduledSequence]) -> Sequence:
        """Return the sequence to preempt when a running sequence lacks a page.

        The victim is the youngest of the sequences that are not in the batch and belong to the
        tenant with the most pages.
        """
        held = self._pages_held()
        others = [each for each in self.running.values() if each.id not in batch]
        return max(others, key=lambda each: (held[each.request.tenant], each.arrival))

    def _with_pages(self, kv: KVSequence, end: int, draft: DraftTree) -> DraftTree:
        """Reserve pages for a draft after the first `end` tokens; return the part that fits."""
        if self.pool.reserve(kv, end + len(draft.token_ids)):
            return draft
        if draft.parents:
            # The main path may fit without its branches.
            draft = draft.first(len(main_path(draft.parents)))
            if self.pool.reserve(kv, end + len(draft.token_ids)):
                return draft
        # A draft is no reason to preempt another sequence. The draft is cut rather than dropped:
        # how many tokens follow a sampled token must not decide whether that token is verified.
        draft = draft.first(max(0, self.pool.room(kv) - end))
        return draft if self.pool.reserve(kv, end + len(draft.token_ids)) else NO_DRAFT

    def admit(self) -> list[Sequence]:
        """Admit waiting sequences while all their tokens fit, and return them.

        An admitted sequence has all its pages, so it does not preempt another sequence at once. A
        sequence of a tenant with few places or pages takes them from the tenant with the most.
        """
        admitted: list[Sequence] = []
        while self.waiting:
            sequence = self.waiting.first(self.tenants)
            victim: Sequence | None = None
            if len(self.running) >= self._max_sequences:
                victim = self._place_victim_for_admission(sequence.request.tenant)
                if victim is None:
                    break
            if victim is None and self._lacks_pages(sequence):
                break
            # Scoring a token needs the logits of the token before it, which no cache holds.
            limit = sequence.unscored.start - 1 if sequence.unscored else None
            tenant = sequence.request.tenant
            cached = self.pool.match_prefix(sequence.kv, sequence.tokens, tenant, limit)
            if victim is not None:
                if not self._fits_without(victim, sequence):
                    self.pool.free(sequence.kv)
                    break
                self._preempt(victim)
            if not self._reserve_for_admission(sequence):
                self.pool.free(sequence.kv)
                break
            self.prompt_token_count += len(sequence.tokens)
            self.cached_token_count += cached
            if sequence.stats.forward_count == 0:
                sequence.cached_token_count = cached
            self.waiting.remove(sequence)
            self.running[sequence.id] = sequence
            self.tenants[tenant] += 1
            sequence.admitted = True
            admitted.append(sequence)
        self.load_meter.admitted()
        return [sequence for sequence in admitted if sequence.id in self.running]

    def _place_victim_for_admission(self, tenant: str) -> Sequence | None:
        """Return the sequence that loses its place to `tenant`.

        The victim is the youngest sequence of the tenant with the most places. That tenant keeps at
        least as many places as `tenant` then has, and so cannot take the place back. Return None if
        no tenant has at least 2 places more than `tenant`.
        """
        most, count = self.tenants.most_common(1)[0]
        if count <= self.tenants[tenant] + 1:
            return None
        own = [each for each in self.running.values() if each.request.tenant == most]
        return max(own, key=_arrival)

    def _fits_without(self, victim: Sequence, sequence: Sequence) -> bool:
        """Return whether a sequence can get its pages if `victim` is preempted for its place.

        If the sequence cannot get its pages, the place would stay empty after the preemption.
        """
        missing = -(-len(sequence.tokens) // self.pool.page_size) - len(sequence.kv.pages)
        if missing <= self.pool.free_count + len(victim.kv.pages):
            return True
        return bool(self._page_victims_for_admission(sequence))

    def _reserve_for_admission(self, sequence: Sequence) -> bool:
        """Reserve pages for all tokens of a sequence, if need be from tenants with more pages."""
        length = len(sequence.tokens)
        if self.pool.reserve(sequence.kv, length):
            return True
        if len(self.tenants) == 0 or self.tenants.keys() == {sequence.request.tenant}:
            return False
        for victim in self._page_victims_for_admission(sequence):
            self._preempt(victim)
        return self.pool.reserve(sequence.kv, length)

    def _lacks_pages(self, sequence: Sequence) -> bool:
        """Return whether a sequence lacks pages, even if it shares all cached pages of its text.

        The method runs at every step for a sequence that waits for pages, so the sequence keeps the
        hashes of its pages.
        """
        tenant = sequence.request.tenant
        if len(self.tenants) > 1 or tenant not in self.tenants:
            return False  # it may take pages from another tenant
        missing = -(-len(sequence.tokens) // self.pool.page_size) - self.pool.free_count
        if missing <= 0:
            return False
        return self.pool.known_pages(sequence.page_hashes, sequence.tokens, tenant) < missing

    def _page_victims_for_admission(self, sequence: Sequence) -> list[Sequence]:
        """Choose the sequences to preempt so that `sequence` gets pages; none if it must wait.

        A tenant that loses pages must keep at least as many pages as the tenant of `sequence` then
        has.
        """
        held = self._pages_held()
        missing = -(-len(sequence.tokens) // self.pool.page_size) - len(sequence.kv.pages)
        own = held.pop(sequence.request.tenant, 0) + len(sequence.kv.pages) + missing
        missing -= self.pool.free_count
        youngest = sorted(self.running.values(), key=_arrival)
        victims: list[Sequence] = []
        while missing > 0 and youngest:
            most = max(held, key=lambda tenant: held[tenant], default=None)
            victim = next(
                (each for each in reversed(youngest) if each.request.tenant == most), None
            )
            if victim is None or most is None:
                return []
            youngest.remove(victim)
            held[most] -= len(victim.kv.pages)
            if held[most] < own:
                return []
            missing -= len(victim.kv.pages)
            victims.append(victim)
        return victims if missing <= 0 else []

    def _pages_held(self) -> Counter[str]:
        """Return the number of pages that each tenant's running sequences hold.

        A shared page counts once for each sequence.
        """
        held: Counter[str] = Counter()
        for sequence in self.running.values():
            held[sequence.request.tenant] += len(sequence.kv.pages)
        return held

    def _preempt(self, victim: Sequence) -> None:
        """Free a sequence's pages and recompute it later; it keeps its tokens and its tries."""
        self.pool.free(victim.kv)
        self._leave(victim)
        self.waiting.put_back(victim)
        self.preemption_count += 1


def _chosen(
    sequence: Sequence, planned: int, room: int, trees: Mapping[int, ChosenDraft]
) -> ChosenDraft:
    """Return the draft to verify in a step that draws a token for the sequence."""
    if sequence.mask_work is not None:
        return chosen_before(sequence, sequence.mask_work)
    if trees and (tree := trees.get(sequence.id)) is not None:
        return tree
    return best_chain(sequence, min(planned, room))


def _arrival(sequence: Sequence) -> int:
    return sequence.arrival


def _scorable(sequence: Sequence, pending: int, rows: int) -> int:
    """Return how many pending tokens fit in a step that has `rows` logits rows for scoring."""
    unscored = sequence.unscored
    if len(unscored) <= rows:
        return pending
    return unscored.start - 1 + rows - sequence.kv.num_computed_tokens


def _scored(sequence: Sequence, start: int, count: int) -> range:
    """Return the prompt positions that the logits of `count` tokens from `start` on can score."""
    unscored = sequence.unscored
    if not unscored:
        return unscored
    return range(unscored.start, min(unscored.stop, start + count + 1))
