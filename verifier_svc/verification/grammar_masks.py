"""Grammars at verification: drafts end with the first token that is forbidden, and every position gets its mask."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from outrider.grammar.backends import Mask, Matcher
from verifier_svc.state.scheduled_sequence import ScheduledSequence
from verifier_svc.state.trie import Path


class GrammarMasks:
    """Works for one engine. Masks are computed on a thread of their own while the model's forward runs.

    The matcher of a sequence belongs to the engine's thread but for that time.
    """

    def __init__(self) -> None:
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="grammar-masks")

    def cut(self, batch: Sequence[ScheduledSequence]) -> list[ScheduledSequence]:
        """The batch with each draft cut at the first token that its grammar forbids, which could not be accepted.

        Where that token was sampled it stays, to be rejected: what follows must come from what the target has more of than the
        drafter, and to drop a token for what it is would be to draw anew.
        """
        found: list[ScheduledSequence] = []
        for scheduled in batch:
            matcher = scheduled.sequence.matcher
            found.append(scheduled if matcher is None else self._cut(scheduled, matcher))
        return found

    def _cut(self, scheduled: ScheduledSequence, matcher: Matcher) -> ScheduledSequence:
        allowed = 0
        for token in scheduled.path.token_ids:
            if not matcher.accept(token):
                break
            allowed += 1
        matcher.rollback(allowed)
        kept = allowed + bool(scheduled.path.distributions)
        return replace(
            scheduled,
            path=Path(scheduled.path.token_ids[:kept], scheduled.path.distributions[:kept]),
        )

    def masks(self, batch: Sequence[ScheduledSequence]) -> Callable[[], list[ScheduledSequence]]:
        """Start computing the masks; call the result for the batch with them."""
        if not any(
            scheduled.sequence.matcher is not None and scheduled.samples for scheduled in batch
        ):
            return lambda: list(batch)
        done = self._worker.submit(lambda: [_masked(scheduled) for scheduled in batch])
        return done.result


def _masked(scheduled: ScheduledSequence) -> ScheduledSequence:
    matcher = scheduled.sequence.matcher
    if matcher is None or not scheduled.samples:
        return scheduled
    tokens = scheduled.path.token_ids
    mask: Mask = np.zeros((len(tokens) + 1, scheduled.sequence.mask_width), np.int32)
    matcher.fill(mask, 0)
    accepted = 0
    for i, token in enumerate(tokens):
        stands = matcher.accept(token)
        accepted += stands
        if not stands or matcher.ended:
            mask[
                i + 1
            ] = (
                -1
            )  # what comes behind a forbidden token is never verified, and behind an end never sent
        else:
            matcher.fill(mask, i + 1)
    matcher.rollback(accepted)
    return replace(scheduled, mask=mask)
