"""Applies grammars at verification: cuts drafts at forbidden tokens, and masks every position."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import compress

import numpy as np

from outrider.grammar.backends import Mask, Matcher
from outrider.token_tree import without_chain
from verifier_svc.state.draft_tree import DraftTree
from verifier_svc.state.scheduled_sequence import ScheduledSequence


class GrammarMasks:
    """Works for one engine. Computes masks on its own thread while the model's forward runs.

    Only during that time may a thread other than the engine's use a sequence's matcher.
    """

    def __init__(self) -> None:
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="grammar-masks")

    def cut(self, batch: Sequence[ScheduledSequence]) -> list[ScheduledSequence]:
        """The batch with each draft cut before the tokens that its grammar forbids.

        The tokens below such a token are cut too. A sampled forbidden token stays and is rejected,
        and the next token is drawn from the residual. To drop the token because of its value would
        be to draw anew, which biases the output.
        """
        found: list[ScheduledSequence] = []
        for scheduled in batch:
            matcher = scheduled.sequence.matcher
            if matcher is not None:
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
        """Start to compute the masks. The result waits for them and returns the masked batch."""
        if not any(each.sequence.matcher is not None and each.samples for each in batch):
            return lambda: list(batch)
        done = self._worker.submit(lambda: [_masked(scheduled) for scheduled in batch])
        return done.result


def _walk(matcher: Matcher, draft: DraftTree) -> Iterator[bool]:
    """For each draft token in order, whether the grammar allows it behind its ancestors.

    Meanwhile the matcher stands behind the token, if it is allowed; afterwards where it was.
    """
    # The rows of the path on which the matcher stands. In a depth-first order, rows behind the
    # parent are done with.
    path = [0]
    parents = draft.parents or range(len(draft.token_ids))
    for row, (token, parent) in enumerate(zip(draft.token_ids, parents, strict=True), 1):
        left = 0
        while path[-1] > parent:
            path.pop()
            left += 1
        if left:
            matcher.rollback(left)
        # A parent that is not on the path was forbidden itself.
        allowed = path[-1] == parent and matcher.accept(token)
        if allowed:
            path.append(row)
        yield allowed
    matcher.rollback(len(path) - 1)


def _subtree(draft: DraftTree, kept: Sequence[bool]) -> DraftTree:
    """The tree of the tokens that are `kept`, whose parents are too; some are not."""
    token_ids: list[int] = []
    parents: list[int] = []
    drafter_ids = list(compress(draft.drafter_ids, kept))
    new_rows = [0]
    for i, keep in enumerate(kept):
        if keep:
            token_ids.append(draft.token_ids[i])
            parents.append(new_rows[draft.parents[i]])
        new_rows.append(len(token_ids))
    # A sibling that becomes a first child by the cut is no favourite.
    return DraftTree(token_ids, [], without_chain(parents), drafter_ids, list(kept).index(False))


def _masked(scheduled: ScheduledSequence) -> ScheduledSequence:
    matcher = scheduled.sequence.matcher
    if matcher is None or not scheduled.samples:
        return scheduled
    draft = scheduled.draft
    mask: Mask = np.zeros((len(draft.token_ids) + 1, scheduled.sequence.mask_width), np.int32)
    matcher.fill(mask, 0)
    for row, allowed in enumerate(_walk(matcher, draft), 1):
        if not allowed or matcher.ended:
            # Rows behind a forbidden token are never verified; those behind an end are never sent.
            mask[row] = -1
        else:
            matcher.fill(mask, row)
    return replace(scheduled, mask=mask)
