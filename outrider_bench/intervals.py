"""Evaluates repeated measurements: intervals by bootstrap, and results that cannot be right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

Shown = Literal["faster", "slower", ""]
MOST_OF_ALLOWED = 1.02
"""A measurement is called disturbed if `of_allowed` returns more than this value for it."""
_RESAMPLES = 2000
_QUANTILES = (0.025, 0.975)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the median, by bootstrap over rounds.

    The interval depends only on the values, and never leaves their range. With fewer than six
    values it mostly is their whole range. The range of three values misses the true median in one
    of four cases.
    """
    low, high = np.quantile(_medians(values, np.random.default_rng(0)), _QUANTILES)
    return float(low), float(high)


def paired_interval(pairs: Sequence[tuple[float, float, float, float]]) -> tuple[float, float]:
    """Return the 95 % interval of the ratio of two rates, by bootstrap over pairs of measurements.

    A pair has the amount and the time of the first rate, then of the second rate. A rate is the sum
    of the amounts over the sum of the times.
    """
    values = np.asarray(pairs, float)
    places = np.random.default_rng(0).integers(0, len(values), (_RESAMPLES, len(values)))
    amount, time, other_amount, other_time = values[places].sum(axis=1).T
    low, high = np.quantile(amount / time / (other_amount / other_time), _QUANTILES)
    return float(low), float(high)


def _medians(values: Sequence[float], draws: np.random.Generator) -> npt.NDArray[np.float64]:
    """Return the medians of resampled rounds."""
    drawn = draws.choice(np.asarray(values, float), (_RESAMPLES, len(values)))
    return np.asarray(np.median(drawn, axis=1), np.float64)


def shown_by(low: float, high: float) -> Shown:
    """Return "faster" if a ratio's interval is above 1, "slower" if below, "" if it contains 1."""
    if low > 1.0:
        return "faster"
    return "slower" if high < 1.0 else ""


def of_allowed(ratio: float, tokens: float, plain_tokens: float = 1.0) -> float:
    """Return a speed-up over plain decoding, divided by the speed-up that tokens per forward allow.

    A forward with draft tokens takes at least as long as a plain forward, so `ratio` is at most
    `tokens` over `plain_tokens`. Both count tokens per sequence and forward. A larger ratio means
    that plain decoding was disturbed.
    """
    return ratio * plain_tokens / tokens
