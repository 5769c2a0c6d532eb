"""Applies grammars at verification: cuts drafts at forbidden tokens, and masks every position."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from outrider.grammar.backends import Mask, Matcher
from verifier_svc.state.draft_tree import DraftTree
from verifier_svc.state.scheduled_sequence import ScheduledSequence


class GrammarMasks:
    """Works for one engine. Computes masks on its own thread while the model's forward runs.

    Only during that time may a thread other than the engine's use a sequence's matcher.
    """

    def __init__(self) -> None:
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="grammar-masks")

    def cut(self, batch: Sequence[ScheduledSequence]) -> list[ScheduledSequence]:
        """The batch with each draft cut before the first token that its grammar forbids.

        A sampled forbidden token stays and is rejected: the next token must be drawn from the
        residual. To drop the token because of its value would be to draw anew, which biases the
        output.
        """
        found: list[ScheduledSequence] = []
        for scheduled in batch:
            matcher = scheduled.sequence.matcher
            found.append(scheduled if matcher is None else self._cut(scheduled, matcher))
        return found

    def _cut(self, scheduled: ScheduledSequence, matcher: Matcher) -> ScheduledSequence:
        draft = scheduled.draft
        allowed = 0
        for token in draft.token_ids:
            if not matcher.accept(token):
                break
            allowed += 1
        matcher.rollback(allowed)
        kept = allowed + bool(draft.distributions)
        kept_draft = DraftTree(draft.token_ids[:kept], draft.distributions[:kept])
        return replace(scheduled, draft=kept_draft)

    def masks(self, batch: Sequence[ScheduledSequence]) -> Callable[[], list[ScheduledSequence]]:
        """Start to compute the masks. The result waits for them and returns the masked batch."""
        if not any(each.sequence.matcher is not None and each.samples for each in batch):
            return lambda: list(batch)
        done = self._worker.submit(lambda: [_masked(scheduled) for scheduled in batch])
        return done.result


def _masked(scheduled: ScheduledSequence) -> ScheduledSequence:
    matcher = scheduled.sequence.matcher
    if matcher is None or not scheduled.samples:
        return scheduled
    tokens = scheduled.draft.token_ids
    mask: Mask = np.zeros((len(tokens) + 1, scheduled.sequence.mask_width), np.int32)
    matcher.fill(mask, 0)
    accepted = 0
    for i, token in enumerate(tokens):
        allowed = matcher.accept(token)
        accepted += allowed
        if not allowed or matcher.ended:
            # Rows behind a forbidden token are never verified; those behind an end are never sent.
            mask[i + 1] = -1
        else:
            matcher.fill(mask, i + 1)
    matcher.rollback(accepted)
    return replace(scheduled, mask=mask)
