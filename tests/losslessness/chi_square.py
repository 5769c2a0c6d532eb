"""Counts against exact enumeration by chi-square, and how small a bias such a test can see."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
from scipy import optimize, stats

LEAST_P = 1e-4
"""A p-value below it is a bias. Seeds are fixed, so what passes once passes always."""
POWER = 0.9
_FEWEST = 5
"""Cells that expect fewer are merged into one."""


@dataclass(frozen=True)
class Comparison:
    """The p-value, and the total variation distance that would not have escaped.

    A law at a distance of `visible` or more over the cells (those that expect few count as one) gives a p-value below `LEAST_P`
    with a probability of `POWER` or more, however the deviation is spread.
    """

    p: float
    visible: float

    def must_agree(self, sees: float) -> None:
        """Fail if there is a bias, or if the test is too weak to see one of `sees`, for want of draws."""
        assert self.visible <= sees, (
            f"sees no bias below {self.visible:.3f}, and not {sees}: more draws are needed"
        )
        assert self.p > LEAST_P


def compare(observed: npt.NDArray[np.int64], expected: npt.NDArray[np.float64]) -> Comparison:
    """Counts of cells against expected counts, [cells] each."""
    expected = expected * (observed.sum() / expected.sum())
    large = expected >= _FEWEST
    merged = [np.append(x[large], x[~large].sum()) for x in (observed, expected)]
    kept = merged[1] > 0
    visible = visible_distance(int(kept.sum()), int(observed.sum()))
    if observed[expected == 0].any():
        return Comparison(0.0, visible)
    return Comparison(float(stats.chisquare(merged[0][kept], merged[1][kept]).pvalue), visible)


@cache
def visible_distance(cells: int, draws: int) -> float:
    """The total variation distance from which on a bias is seen with a probability of `POWER`.

    Under another law the statistic is noncentral chi-square, by `draws` times the chi-square divergence D. Of all laws at a total
    variation TV the one whose cells are all off by the same share has the least divergence, 4 TV^2.
    """
    freedom = cells - 1
    threshold = stats.chi2.isf(LEAST_P, freedom)
    needed = optimize.brentq(
        lambda shift: stats.ncx2.sf(threshold, freedom, shift) - POWER, 1e-6, 10 * threshold
    )
    return float(0.5 * np.sqrt(needed / draws))
