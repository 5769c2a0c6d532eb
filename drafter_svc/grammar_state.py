"""The state of a request's grammar after a drafter's guesses."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from outrider.drafter.draft_sequence import DraftSequence
from outrider.errors import OutriderError
from outrider.grammar.backends import Mask, MaskLimit, Matcher
from outrider.process.clock import Clock, thread_cpu

if TYPE_CHECKING:
    from outrider.grammar.compiler import GrammarCompiler

log = logging.getLogger(__name__)

# Seconds of processor time. Each mask may take `_FREE_S`. The time beyond that, added over all
# masks of a sequence, may be at most `_MOST_S`. Usual masks take 0.05 to 0.5 ms. While a mask is
# computed, the drafts of other sequences wait.
_FREE_S = 0.005
_MOST_S = 0.1


class GrammarState:
    """Follows an output, guesses included, through a grammar, and rolls back when guesses change.

    If the grammar takes too much processor time, the state masks nothing from then on.
    """

    def __init__(
        self, matcher: Matcher | None, mask_width: int, cpu_clock: Clock = thread_cpu
    ) -> None:
        """A row of the mask has `mask_width` int32 numbers. Without a matcher nothing is masked."""
        self._cpu_clock = cpu_clock
        self._excess_s = 0.0
        self._matcher = matcher
        self._width = mask_width
        self._accepted: list[int] = []

    @classmethod
    def of(cls, sequence: DraftSequence, grammars: GrammarCompiler | None) -> GrammarState | None:
        """Compile a sequence's grammar, which can take long; return None if it has no grammar.

        If the grammar cannot be compiled, the function logs a warning, and the state masks no
        tokens. The verifier masks tokens anyway, since it has compiled the same grammar.
        """
        grammar = sequence.opened.grammar
        if grammar is None or grammars is None:
            return None
        matcher = None
        try:
            matcher = grammars.compile(grammar).matcher()
        except OutriderError as error:
            log.warning("sequence %d is drafted without its grammar: %s", sequence.id, error)
        return cls(matcher, grammars.mask_width)

    def mask(self, output: list[int]) -> Mask | None:
        """Return the bit mask, [1, mask_width], of the tokens that may follow `output`.

        Return None, so that nothing is masked, if the grammar forbids `output`, has ended, or
        allows no token. Once the grammar has forbidden an output, the state masks no later output
        either.
        """
        began = self._cpu_clock()
        mask = self._mask(output)
        self._excess_s += max(0.0, self._cpu_clock() - began - _FREE_S)
        if self._excess_s > _MOST_S:
            self._matcher = None
        return mask

    def _mask(self, output: list[int]) -> Mask | None:
        if self._matcher is None or not self._move_to(self._matcher, output):
            return None
        if self._matcher.ended:
            return None
        mask: Mask = np.zeros((1, self._width), np.int32)
        try:
            self._matcher.fill(mask, 0)
        except MaskLimit:
            self._matcher = None
        return mask if mask.any() else None

    def _move_to(self, matcher: Matcher, output: list[int]) -> bool:
        """Move the matcher to the end of `output`; return False if the grammar forbids `output`."""
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
