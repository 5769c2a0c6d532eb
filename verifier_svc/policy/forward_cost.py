"""Estimates a forward's duration from its numbers of sequences and tokens.

Trial forwards at the start give the estimates, and every step corrects them.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise

# The least duration of a forward, whatever the clock says.
_LEAST_S = 1e-6
# When a step took longer or shorter than predicted, all costs are corrected by a fraction of this
# error. The fraction is `_OWN` for forwards with as many sequences and tokens as the step, `_NEAR`
# for forwards with as many sequences but more or fewer tokens, and `_FAR` for all other forwards.
# Whatever slows down one step slows down similar steps. If the costs of similar steps stayed
# behind, further tokens would seem to cost nothing.
_OWN = 0.3
_NEAR = 0.2
_FAR = 0.05
# Least cost that some estimates assume for a prompt token, as a share of the time of a step with
# one token.
_TYPICAL_PROMPT_TOKEN = 0.01


class ForwardCost:
    """Estimates the seconds of a step from its numbers of sequences and tokens.

    A step is a forward and the host's work for it, which grows with the drafts. Trial forwards
    before the first request give a grid of durations; every step corrects it.
    """

    def __init__(self) -> None:
        # Seconds, keyed by the number of sequences, then by the number of tokens per sequence.
        self._grid: dict[float, dict[float, float]] = {}
        # The grid's keys in rising order. `_counts` are its numbers of sequences. `_depths` maps
        # each of these to its numbers of tokens per sequence. `_drafted_depths` has all numbers of
        # tokens per sequence that are above 1.
        self._counts: list[float] = []
        self._depths: dict[float, list[float]] = {}
        self._drafted_depths: list[float] = []
        self._known: dict[tuple[int, int], float] = {}
        self.prompt_step_s = 0.0
        """Seconds that reading prompts adds to a step, however many tokens of prompts it reads."""
        self.prompt_token_s = 0.0
        """Seconds that each token of a prompt adds to a step, besides `prompt_step_s`."""

    def calibrate(self, sequence_count: int, token_count: int, seconds: float) -> None:
        """Enter a trial forward into the grid."""
        row = self._grid.setdefault(sequence_count, {})
        row[token_count / sequence_count] = max(seconds, _LEAST_S)
        self._counts = sorted(self._grid)
        self._depths = {count: sorted(row) for count, row in self._grid.items()}
        self._drafted_depths = sorted(
            {depth for row in self._grid.values() for depth in row if depth > 1.0}
        )
        self._known.clear()

    def observe(
        self, sequence_count: int, token_count: int, seconds: float, prompt_token_count: int = 0
    ) -> None:
        """Correct the costs after a step that took `seconds`.

        The step had `token_count` tokens of `sequence_count` decoding sequences, and
        `prompt_token_count` tokens of prompts besides. In a step with both, the prediction error is
        split between prompt and decode tokens in proportion to the square of the predicted cost of
        each (the LMS rule).
        """
        if not self._grid:
            if prompt_token_count == 0:
                self.calibrate(sequence_count, token_count, seconds)
            return
        decoding_s = self.estimate(sequence_count, token_count) if sequence_count else 0.0
        # A cost of 0, or a cost that is far too low, must be able to grow.
        decode_step_s = self.estimate(1, 1)
        least_token_s = _TYPICAL_PROMPT_TOKEN * decode_step_s
        prompts_s = prompt_token_count * max(self.prompt_token_s, least_token_s)
        expected = decoding_s + self.prompts_s(prompt_token_count)
        # One step that was held up says little, so no step counts for more than a factor of two.
        error = min(max(seconds, 0.5 * expected), 2.0 * max(expected, decode_step_s)) - expected
        share = prompts_s**2 / max(prompts_s**2 + decoding_s**2, 1e-18)
        if prompt_token_count:
            token_s = self.prompt_token_s + _NEAR * share * error / prompt_token_count
            self.prompt_token_s = max(0.0, token_s)
        if sequence_count:
            ratio = max(0.5, 1.0 + (1.0 - share) * error / max(decoding_s, 1e-9))
            self._correct(sequence_count, token_count, ratio)

    def calibrate_prompts(self, short: tuple[int, float], long: tuple[int, float]) -> None:
        """Learn the cost of prompts from two forwards of one prompt each, as (tokens, seconds)."""
        self.prompt_token_s = max(0.0, long[1] - short[1]) / (long[0] - short[0])
        tokens_s = short[0] * self.prompt_token_s
        self.prompt_step_s = max(0.0, short[1] - self.estimate(1, 1) - tokens_s)

    def prompt_tokens_in(self, seconds: float) -> int:
        """Return how many prompt tokens make a step longer by at most `seconds`."""
        least_token_s = _TYPICAL_PROMPT_TOKEN * self.estimate(1, 1)
        left_s = max(0.0, seconds - self.prompt_step_s)
        return int(left_s / max(self.prompt_token_s, least_token_s, _LEAST_S))

    def prompts_s(self, token_count: int) -> float:
        """Return the seconds that prompts of `token_count` tokens add to a step."""
        return self.prompt_step_s + token_count * self.prompt_token_s if token_count else 0.0

    def _correct(self, sequence_count: int, token_count: int, ratio: float) -> None:
        """Multiply each cost by a power of `ratio`.

        The exponent is greater for sizes nearer to the step's size.
        """
        rows = _shares(self._counts, sequence_count)
        for count, row in self._grid.items():
            near = rows.get(count, 0.0)
            cells = _shares(self._depths[count], token_count / sequence_count)
            for depth in row:
                own = near * cells.get(depth, 0.0)
                row[depth] *= ratio ** (_FAR + (_NEAR - _FAR) * near + (_OWN - _NEAR) * own)
        self._known.clear()

    @property
    def known(self) -> bool:
        """True if any forward was measured."""
        return bool(self._grid)

    def estimate(self, sequence_count: int, token_count: int) -> float:
        """Return the seconds of a forward, interpolated between measured forwards.

        Return 0 before the first measured forward.
        """
        if not self._grid:
            return 0.0
        key = (sequence_count, token_count)
        known = self._known.get(key)
        if known is None:
            depth = token_count / max(sequence_count, 1)
            counts = _neighbours(self._counts, sequence_count)
            points = {
                count: _interpolate(self._depths[count], self._grid[count], depth)
                for count in counts
            }
            known = self._known[key] = _interpolate(counts, points, sequence_count)
        return known

    def further_tokens_s(self, sequence_count: int) -> list[tuple[int, float]]:
        """Return the rising marginal costs of draft tokens: (up to this many, seconds of each).

        Where the duration grows in jumps, as with graphs of fixed sizes, the cost of a jump is
        spread over all tokens that it makes room for.
        """
        # The lower convex hull of the measured points, by Andrew's monotone chain.
        hull = [(0, self.estimate(sequence_count, sequence_count))]
        for depth in self._drafted_depths:
            count = round(sequence_count * depth)
            point = (count - sequence_count, self.estimate(sequence_count, count))
            while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-2], point):
                hull.pop()
            if point[0] > hull[-1][0]:
                hull.append(point)
        return [(end[0], _slope(begin, end)) for begin, end in pairwise(hull)]


def _slope(begin: tuple[int, float], end: tuple[int, float]) -> float:
    return (end[1] - begin[1]) / (end[0] - begin[0])


def _neighbours(xs: list[float], x: float) -> list[float]:
    """Return the two neighbours of `x` in the sorted `xs`, clamped at the ends of `xs`.

    If `xs` has only one number, return only this one.
    """
    i = min(max(bisect_left(xs, x), 1), len(xs) - 1)
    return xs[max(i - 1, 0) : i + 1]


def _interpolate(xs: list[float], points: dict[float, float], x: float) -> float:
    """Return the value at `x` on the line through the two nearest points.

    If `x` is beyond all points, the result is at least the least value of a point. `xs` are the
    keys of `points` in rising order.
    """
    if len(xs) == 1:
        return points[xs[0]]
    i = min(max(bisect_left(xs, x), 1), len(xs) - 1)
    low = xs[i - 1]
    high = xs[i]
    value = points[low] + (points[high] - points[low]) * (x - low) / (high - low)
    return value if low <= x <= high else max(value, min(points.values()))


def _shares(points: list[float], x: float) -> dict[float, float]:
    """Return how far the points around `x` must move to move the line between them by 1 at `x`.

    The result is the least-squares solution.
    """
    xs = _neighbours(points, x)
    if len(xs) == 1:
        return {xs[0]: 1.0}
    high = min(max((x - xs[0]) / (xs[1] - xs[0]), 0.0), 1.0)
    low = 1.0 - high
    squares = low * low + high * high
    return {xs[0]: low / squares, xs[1]: high / squares}
