"""Finds the tokens to move in the cache so that a tree's accepted ones follow one another.

A tree's tokens lie in the slots behind the text in the tree's order. The accepted path must lie
there in the text's order, before a page of it is shared or the next forward reads it.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.protocol.errors import OutriderError
from verifier_svc.state.scheduled_sequence import ScheduledSequence
from verifier_svc.verification.batch import Verified


def moved_slots(
    batch: Sequence[ScheduledSequence],
    verified: Sequence[Verified | OutriderError],
    page_size: int,
) -> tuple[list[int], list[int]]:
    """The slots of the flattened cache to copy from and to, for a whole step; often none."""
    sources: list[int] = []
    targets: list[int] = []
    for scheduled, found in zip(batch, verified, strict=True):
        if not scheduled.draft.parents or isinstance(found, OutriderError) or found.result is None:
            continue
        pages = scheduled.sequence.kv.pages
        root = scheduled.start + len(scheduled.token_ids) - 1
        for place, row in enumerate(found.result.rows, 1):
            if row != place:
                sources.append(_slot(pages, root + row, page_size))
                targets.append(_slot(pages, root + place, page_size))
    return sources, targets


def _slot(pages: Sequence[int], index: int, page_size: int) -> int:
    return pages[index // page_size] * page_size + index % page_size
