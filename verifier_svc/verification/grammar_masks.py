"""Applies grammars in verification: cuts drafts at forbidden tokens, and masks every position."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import compress

import numpy as np

from outrider.errors import OutriderError, Reason
from outrider.grammar.backends import Mask, MaskLimit, Matcher, too_expensive
from outrider.protocol.token_tree import without_chain
from verifier_svc.policy.draft_trees import ChosenDraft
from verifier_svc.state.mask_work import MaskWork
from verifier_svc.state.scheduled_sequence import ScheduledSequence
from verifier_svc.state.sequence import Assignment
from verifier_svc.state.sequence import Sequence as SequenceState
from verifier_svc.state.trie import NO_DRAFT, DraftTree
from verifier_svc.verification.mask_lanes import Inline, MaskBudget, MaskLanes

log = logging.getLogger(__name__)

_INLINE = Inline()
_NO_BUDGET = MaskBudget(math.inf)
# How long a step waits for masks after all that the host does during the forward (seconds). A
# sequence whose masks come later joins a later step.
_PATIENCE_S = 0.01
# A sequence whose last masks took longer than this for a row (seconds) gets no drafts, and its next
# mask is computed before its next step. Usual masks take 0.05 to 0.5 ms.
_SLOW_ROW_S = 0.005


class GrammarMasks:
    """Cuts one engine's drafts, and computes masks on threads of `lanes` during the forward.

    A sequence whose masks are not there in time is left out of the step: nothing of it is accepted
    or drawn. Such a sequence comes back, when the masks are there, with the same draft and the same
    noise, which depends only on seed and position. The sequence's text therefore does not depend on
    how long masks take, even where that time depends on the values of sampled draft tokens. Whether
    later steps draft at all may depend on that time. This is harmless, because their drafts are
    sampled only afterwards.
    """

    def __init__(
        self,
        lanes: MaskLanes = _INLINE,
        budget: MaskBudget = _NO_BUDGET,
        wake: Callable[[], object] = bool,
    ) -> None:
        """`wake` is called when the masks of a waiting sequence are ready."""
        self._lanes = lanes
        self._budget = budget
        self._wake = wake

    def cut(self, batch: Sequence[ScheduledSequence]) -> list[ScheduledSequence]:
        """Return the batch with each draft cut before the tokens that its grammar forbids.

        The tokens below such a token are cut too. But if the draft was sampled, its first forbidden
        token stays, is rejected, and the next token is drawn from the residual. Dropping the token
        because of its value would amount to drawing anew, which biases the output.
        """
        found: list[ScheduledSequence] = []
        for scheduled in batch:
            matcher = scheduled.sequence.matcher
            # Masks that were requested in an earlier step belong to this draft.
            if matcher is not None and scheduled.sequence.mask_work is None:
                scheduled = self._cut(scheduled, matcher)
            found.append(scheduled)
        return found

    def _cut(self, scheduled: ScheduledSequence, matcher: Matcher) -> ScheduledSequence:
        draft = scheduled.draft
        allowed = list(_walk(matcher, draft))
        if all(allowed):
            return scheduled
        if draft.parents:
            return replace(scheduled, draft=_subtree(draft, allowed))
        kept = allowed.index(False) + bool(draft.distributions)
        return replace(scheduled, draft=draft.first(kept))

    def masks(self, batch: Sequence[ScheduledSequence]) -> Callable[[], list[ScheduledSequence]]:
        """Start to compute the masks that are missing.

        The returned function waits for them for at most 10 ms, and returns the batch with masks. A
        sequence whose mask is late gets no mask, and is marked as late in `batch` and in the
        returned batch.
        """
        masked = [each for each in batch if each.sequence.matcher is not None and each.samples]
        if not masked:
            return lambda: list(batch)
        by_tenant: dict[str, list[MaskWork]] = {}
        # Quick masks come first: after slow masks of the same tenant, they would have to wait.
        for scheduled in sorted(masked, key=lambda each: each.sequence.mask_row_s):
            sequence = scheduled.sequence
            if sequence.mask_work is None:
                work = _work_of(sequence, scheduled.draft, scheduled.assignment)
                by_tenant.setdefault(sequence.request.tenant, []).append(work)
        for tenant, works in by_tenant.items():
            self._lanes.begin(works, tenant)
        return lambda: self._masked(batch)

    def prepare(self, sequences: Iterable[SequenceState]) -> None:
        """Start to compute the masks of the sequences' next step, if their masks take long."""
        for sequence in sequences:
            # A sequence that is recomputed in chunks after a preemption has its masks already.
            if sequence.mask_work is not None:
                continue
            if sequence.matcher is not None and has_slow_masks(sequence):
                work = _work_of(sequence, NO_DRAFT, None)
                self._lanes.begin_slow(work, sequence.request.tenant)
                work.wake_when_done(self._wake)

    def error(self, sequence: SequenceState) -> OutriderError | None:
        """Return why a sequence has to end because of its masks; None if it may go on."""
        work = sequence.mask_work
        if work is not None and work.failure is not None:
            grammar = sequence.request.grammar
            if isinstance(work.failure, MaskLimit) and grammar is not None:
                return too_expensive(grammar)
            log.error("a grammar's masks failed", exc_info=work.failure)
            return OutriderError(Reason.INTERNAL, "the grammar's masks could not be computed")
        return self._budget.error(sequence)

    def _masked(self, batch: Sequence[ScheduledSequence]) -> list[ScheduledSequence]:
        works = [each.sequence.mask_work for each in batch if each.samples]
        self._lanes.wait([work for work in works if work is not None], _PATIENCE_S)
        found: list[ScheduledSequence] = []
        for scheduled in batch:
            sequence = scheduled.sequence
            work = sequence.mask_work
            if work is not None and scheduled.samples:
                rows = len(scheduled.draft.token_ids) + 1
                if work.done and work.mask is not None and len(work.mask) >= rows:
                    self._budget.charge(sequence, work)
                    sequence.mask_work = None
                    scheduled = replace(scheduled, mask=work.mask[:rows])
                else:
                    if work.mask is not None:
                        # A mask of the draft is too expensive, so the step is repeated without the
                        # draft.
                        work.draft, work.drafter_id = NO_DRAFT, ""
                    scheduled.is_late = True
                    work.wake_when_done(self._wake)
            found.append(scheduled)
        return found


def _work_of(sequence: SequenceState, draft: DraftTree, assignment: Assignment | None) -> MaskWork:
    """Set and return the work of a sequence's masks.

    The first mask is for the token after the committed tokens. Each draft token adds a mask, for
    the token after it.
    """
    assert sequence.matcher is not None
    late = sequence.tokens[len(sequence.tokens) - sequence.grammar_lag :]
    sequence.grammar_lag = 0
    compute = partial(_mask, sequence.matcher, late, draft, sequence.mask_width)
    drafter_id = "" if assignment is None else assignment.drafter.id
    sequence.mask_work = MaskWork(compute, draft, drafter_id)
    return sequence.mask_work


def chosen_before(sequence: SequenceState, work: MaskWork) -> ChosenDraft:
    """Return the draft for which a sequence's masks were requested.

    Return an empty draft if one of its drafters has left.
    """
    draft = work.draft
    if not draft.token_ids:
        return None, draft
    if not sequence.assignments.keys() >= {work.drafter_id, *draft.drafter_ids}:
        return None, NO_DRAFT
    return sequence.assignments[work.drafter_id], draft


def _walk(matcher: Matcher, draft: DraftTree) -> Generator[bool, None, None]:
    """Yield for each draft token, in order, whether the grammar allows it after its ancestors.

    When a result is yielded, the matcher stands after that token if the token is allowed. In the
    end the matcher stands where it stood before.
    """
    # The rows of the path on which the matcher stands. In a depth-first order, rows after the next
    # token's parent are no longer needed.
    path = [0]
    parents = draft.parents or range(len(draft.token_ids))
    try:
        for row, (token, parent) in enumerate(zip(draft.token_ids, parents, strict=True), 1):
            left = 0
            while path[-1] > parent:
                path.pop()
                left += 1
            if left:
                matcher.rollback(left)
            # A parent that is not on the path was forbidden, so its child is forbidden too.
            allowed = path[-1] == parent and matcher.accept(token)
            if allowed:
                path.append(row)
            yield allowed
    finally:
        matcher.rollback(len(path) - 1)


def _subtree(draft: DraftTree, kept: Sequence[bool]) -> DraftTree:
    """Cut a tree to the tokens that `kept` marks.

    At least one token is left out, but no parent of a kept token.
    """
    token_ids: list[int] = []
    parents: list[int] = []
    drafter_ids = list(compress(draft.drafter_ids, kept))
    new_rows = [0]
    for i, keep in enumerate(kept):
        if keep:
            token_ids.append(draft.token_ids[i])
            parents.append(new_rows[draft.parents[i]])
        new_rows.append(len(token_ids))
    # If the cut removes a first child, the sibling that takes its place is no main guess.
    return DraftTree(token_ids, [], without_chain(parents), drafter_ids, list(kept).index(False))


def has_slow_masks(sequence: SequenceState) -> bool:
    """Return whether the sequence's masks take long.

    The grammar of such a sequence also takes long to advance.
    """
    return sequence.mask_row_s > _SLOW_ROW_S


def _mask(matcher: Matcher, late: Sequence[int], draft: DraftTree, width: int) -> Mask:
    """Return the masks of a draft, after the grammar has been given the tokens of `late`.

    Returns only the first row if a later row is too expensive: without the draft, the text may
    never reach the state of that row. A sampled draft cannot be dropped because of its tokens,
    since that would bias the text. So the function raises MaskLimit if a row of a sampled draft, or
    the first row of any draft, is too expensive.
    """
    for token in late:
        if not matcher.accept(token):
            raise ValueError(f"the token {token} was sampled, which the grammar's mask forbids")
    mask: Mask = np.zeros((len(draft.token_ids) + 1, width), np.int32)
    matcher.fill(mask, 0)
    with closing(_walk(matcher, draft)) as walk:
        for row, allowed in enumerate(walk, 1):
            if not allowed or matcher.ended:
                # Rows after a forbidden token are never verified, and rows after the text's end are
                # never committed.
                mask[row] = -1
                continue
            try:
                matcher.fill(mask, row)
            except MaskLimit:
                if draft.distributions:
                    raise
                return mask[:1]
    return mask
