"""Grammars at verification: drafts end with the first token that is forbidden, and every position gets its mask."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from outrider.grammar_backends import Mask, Matcher
from verifier_svc.scheduler import Item
from verifier_svc.trie import Path


class Guidance:
    """Works for one engine. Masks are computed on a thread of their own while the model's forward runs.

    The matcher of a sequence belongs to the engine's thread but for that time.
    """

    def __init__(self) -> None:
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="grammar-masks")

    def cut(self, items: Sequence[Item]) -> list[Item]:
        """The items, each draft cut at the first token that its grammar forbids, which could not be accepted.

        Where that token was sampled it stays, to be rejected: what follows must come from what the target has more of than the
        drafter, and to drop a token for what it is would be to draw anew.
        """
        return [self._cut(item, item.sequence.matcher) if item.sequence.matcher is not None else item for item in items]

    def _cut(self, item: Item, matcher: Matcher) -> Item:
        allowed = 0
        for token in item.path.token_ids:
            if not matcher.accept(token):
                break
            allowed += 1
        matcher.rollback(allowed)
        kept = allowed + bool(item.path.distributions)
        return replace(item, path=Path(item.path.token_ids[:kept], item.path.distributions[:kept]))

    def masks(self, items: Sequence[Item]) -> Callable[[], list[Item]]:
        """Start computing; call the result for the items with their masks."""
        if not any(item.sequence.matcher is not None and item.samples for item in items):
            return lambda: list(items)
        done = self._worker.submit(lambda: [_masked(item) for item in items])
        return done.result


def _masked(item: Item) -> Item:
    matcher = item.sequence.matcher
    if matcher is None or not item.samples:
        return item
    tokens = item.path.token_ids
    mask: Mask = np.zeros((len(tokens) + 1, item.sequence.mask_width), np.int32)
    matcher.fill(mask, 0)
    accepted = 0
    for i, token in enumerate(tokens):
        stands = matcher.accept(token)
        accepted += stands
        if not stands or matcher.ended:
            mask[i + 1] = -1  # what comes behind a forbidden token is never judged, and behind an end never sent
        else:
            matcher.fill(mask, i + 1)
    matcher.rollback(accepted)
    return replace(item, mask=mask)
