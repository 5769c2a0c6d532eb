"""Compares counts with exact enumeration in a chi-square test; says how small a bias it sees."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
from scipy import optimize, stats

LEAST_P = 1e-4
"""A lower p-value shows a bias. Seeds are fixed, so a test that passes once always passes."""
POWER = 0.9
_FEWEST = 5
"""Cells with a lower expected count are merged into one."""


@dataclass(frozen=True)
class Comparison:
    """The result of a chi-square test, and its power."""

    p: float
    """The p-value."""
    visible: float
    """The least total variation distance that the test sees, over the merged cells.

    Any distribution at this distance gives a p-value below `LEAST_P` with a probability of at least
    `POWER`.
    """

    def must_agree(self, sees: float) -> None:
        """Fail if there is a bias, or if too few draws were made to see a bias of `sees`."""
        assert self.visible <= sees, (
            f"sees no bias below {self.visible:.3f}, but should see {sees}: more draws are needed"
        )
        assert self.p > LEAST_P


def compare(observed: npt.NDArray[np.int64], expected: npt.NDArray[np.float64]) -> Comparison:
    """Compare the counts of cells with the expected counts, [cells] each."""
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
    """Return the least total variation distance that is seen with probability `POWER`.

    Under another distribution the statistic is noncentral chi-square. Its noncentrality is `draws`
    times the chi-square divergence. Among distributions at a total variation TV, the divergence is
    least, 4 TV^2, where all cells are off by the same share.
    """
    freedom = cells - 1
    threshold = stats.chi2.isf(LEAST_P, freedom)
    needed = optimize.brentq(
        lambda shift: stats.ncx2.sf(threshold, freedom, shift) - POWER, 1e-6, 10 * threshold
    )
    return float(0.5 * np.sqrt(needed / draws))
