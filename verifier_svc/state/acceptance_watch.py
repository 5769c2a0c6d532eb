"""Notices that a drafter guesses clearly worse than in its first hour, or than with old weights."""

from __future__ import annotations

import math

# A block has at least this many verified tokens. The first hour is a block too, so it lasts longer
# if fewer tokens were verified in it.
_BLOCK_TOKENS = 2000
_FIRST_S = 3600.0
# A rate has fallen if it is lower than the first hour's rate by this share of that rate, and by
# this many standard deviations of a block. The outcomes of one draft's tokens are correlated, so a
# block counts as a quarter of its tokens.
_LEAST_FALL = 0.2
_DEVIATIONS = 4.0
_ALIKE = 4


class AcceptanceWatch:
    """Compares the acceptance of each block of verified tokens with the first hour's acceptance.

    If the drafter's weights were replaced, it compares with the earlier weights instead.

    A change of the traffic changes acceptance too, so a fall is a reason to look and nothing more.
    """

    def __init__(self) -> None:
        self.first_rate: float | None = None
        """Share of tokens that were accepted in the first hour, or with the earlier weights.

        None until the first hour is over.
        """
        self.basis = "in its first hour"
        """Where `first_rate` was measured, in words for the log."""
        self.rate = 0.0
        """Share of accepted tokens in the last block."""
        self.fell = False
        self._began_at: float | None = None
        self._verified = 0
        self._accepted = 0

    def resume(self, earlier: AcceptanceWatch) -> None:
        """Go on for the same weights on a new stream, whose counts begin at 0."""
        self.first_rate, self.basis = earlier.first_rate, earlier.basis
        self.rate, self.fell = earlier.rate, earlier.fell
        self._began_at = earlier._began_at

    def continue_from(self, earlier: AcceptanceWatch, verified: int, accepted: int) -> None:
        """Compare with earlier weights, of whose `verified` tokens `accepted` were accepted.

        If too few of their tokens were verified, compare with the rate that `earlier` used.
        """
        if verified >= _BLOCK_TOKENS:
            self.first_rate, self.basis = accepted / verified, "with its earlier weights"
        else:
            self.first_rate, self.basis = earlier.first_rate, earlier.basis

    def look(self, verified: int, accepted: int, now: float) -> bool:
        """Take the drafter's counts so far, at `now` (seconds); return whether `fell` changed."""
        if self._began_at is None:
            self._began_at = now
        count = verified - self._verified
        if count < _BLOCK_TOKENS:
            return False
        if self.first_rate is None and now - self._began_at < _FIRST_S:
            return False
        self.rate = (accepted - self._accepted) / count
        self._verified, self._accepted = verified, accepted
        if self.first_rate is None:
            self.first_rate = self.rate
            return False
        before = self.fell
        first = self.first_rate
        deviation = math.sqrt(first * (1.0 - first) * _ALIKE / count)
        margin = max(_LEAST_FALL * first, _DEVIATIONS * deviation)
        # A fallen rate must come back by half the margin, so that a rate near the margin does not
        # switch `fell` on and off.
        self.fell = self.rate < first - (margin / 2 if before else margin)
        return self.fell is not before
