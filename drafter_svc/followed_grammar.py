"""A request's grammar beside what a drafter guesses: it goes along with the text, and back when guesses fall."""

from __future__ import annotations

import numpy as np

from outrider.grammar.backends import Mask, Matcher


class FollowedGrammar:
    """A grammar that goes along with the output, guesses included, and back when they fall."""

    def __init__(self, matcher: Matcher | None, mask_width: int) -> None:
        """Without a matcher nothing is ever masked."""
        self._matcher = matcher
        self._width = mask_width
        self._seen: list[int] = []

    def mask(self, output: list[int]) -> Mask | None:
        """What may follow `output`, as one row; None once the output left the grammar, or came to its end."""
        if self._matcher is None or not self._go_to(output) or self._matcher.ended:
            return None
        mask: Mask = np.zeros((1, self._width), np.int32)
        self._matcher.fill(mask, 0)
        return mask if mask.any() else None

    def _go_to(self, output: list[int]) -> bool:
        pairs = enumerate(zip(self._seen, output, strict=False))
        common = next(
            (i for i, (one, other) in pairs if one != other), min(len(self._seen), len(output))
        )
        if self._matcher is None:
            return False
        self._matcher.rollback(len(self._seen) - common)
        del self._seen[common:]
        for token in output[common:]:
            if not self._matcher.accept(token):
                self._matcher = None
                return False
            self._seen.append(token)
        return True
