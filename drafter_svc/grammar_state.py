"""The state of a request's grammar behind a drafter's guesses."""

from __future__ import annotations

import numpy as np

from outrider.grammar.backends import Mask, Matcher


class GrammarState:
    """Follow an output, guesses included, through a grammar, and roll back when guesses change."""

    def __init__(self, matcher: Matcher | None, mask_width: int) -> None:
        """`mask_width` is the mask's int32 words a row. Without a matcher nothing is masked."""
        self._matcher = matcher
        self._width = mask_width
        self._accepted: list[int] = []

    def mask(self, output: list[int]) -> Mask | None:
        """The bit mask, [1, mask_width], of the tokens that may follow `output`.

        None, so that nothing is masked, if the grammar forbids `output`, has ended, or allows no
        token. Once it has forbidden an output, the state masks no later one either.
        """
        if self._matcher is None or not self._move_to(self._matcher, output):
            return None
        if self._matcher.ended:
            return None
        mask: Mask = np.zeros((1, self._width), np.int32)
        self._matcher.fill(mask, 0)
        return mask if mask.any() else None

    def _move_to(self, matcher: Matcher, output: list[int]) -> bool:
        """Roll back to the prefix shared with `output` and accept the rest; False if forbidden."""
        common = 0
        for accepted, token in zip(self._accepted, output, strict=False):
            if accepted != token:
                break
            common += 1
        matcher.rollback(len(self._accepted) - common)
        del self._accepted[common:]
        for token in output[common:]:
            if not matcher.accept(token):
                self._matcher = None
                return False
            self._accepted.append(token)
        return True
