"""Measurements of the guesses beside a favourite: how often one of them is right instead of it."""

from __future__ import annotations

# Depths and ranks from here on share a measurement.
_DEPTHS = 4
_RANKS = 8
# Weight of the prior, in guesses that were expected to be right.
_PRIOR_WEIGHT = 1.0
_DECAY = 0.995
# Prior share of wrong favourites with a right guess beside them, and its weight in favourites.
_FIRST_SHARE = 0.4
_SHARE_WEIGHT = 4.0
_SHARE_DECAY = 0.99


class SideRates:
    """How far one drafter's claims about guesses beside the favourite hold, by depth and rank.

    A claim is an estimate, made before the commit, of the probability that a guess is right if its
    parent is: the drafter's confidence, or a prior. The factor between claims and commits corrects
    it. The factor comes from sums in which older guesses count less, and begins at 1.
    """

    __slots__ = ("_claimed", "_rescued", "_right", "_wrong", "rescued_share")

    def __init__(self) -> None:
        self._right = [0.0] * (_DEPTHS * _RANKS)
        self._claimed = [0.0] * (_DEPTHS * _RANKS)
        self._rescued = 0.0
        self._wrong = 0.0
        self.rescued_share = _FIRST_SHARE
        """Share of wrong favourites that a guess beside them rescued, if a tree was asked for."""

    def observe(self, depth: int, rank: int, claim: float, right: bool) -> None:
        """Count a guess behind `depth` others whose parent was committed.

        `rank` is its place among the drafter's guesses behind that parent, from 0.
        """
        at = _place(depth, rank)
        self._right[at] = self._right[at] * _DECAY + right
        self._claimed[at] = self._claimed[at] * _DECAY + claim

    def estimate(self, depth: int, rank: int, claim: float) -> float:
        """The corrected claim, at most 1."""
        at = _place(depth, rank)
        factor = (self._right[at] + _PRIOR_WEIGHT) / (self._claimed[at] + _PRIOR_WEIGHT)
        return min(claim * factor, 1.0)

    def observe_wrong(self, rescued: bool) -> None:
        """Count a wrong favourite; `rescued` if a guess beside it was right and worth verifying."""
        self._rescued = self._rescued * _SHARE_DECAY + rescued
        self._wrong = self._wrong * _SHARE_DECAY + 1.0
        right = self._rescued + _FIRST_SHARE * _SHARE_WEIGHT
        self.rescued_share = right / (self._wrong + _SHARE_WEIGHT)


def _place(depth: int, rank: int) -> int:
    return min(depth, _DEPTHS - 1) * _RANKS + min(rank, _RANKS - 1)
