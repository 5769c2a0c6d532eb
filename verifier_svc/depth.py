"""What a draft is worth: measured acceptance, measured times, and so how deep to draft and how long to wait.

Knows numbers; not sequences, drafters or streams.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from itertools import accumulate, pairwise
from operator import mul
from statistics import median

from outrider.messages import MAX_DEPTH

_DECAY = 0.9
_PRIOR_WEIGHT = 4.0
# Drafts after which the prior is looked up again where it learns as well.
_PRIOR_KEPT = 8
_SAMPLES = 7
# No forward is believed to take less.
_LEAST_S = 1e-6
# How much one step moves the price of forwards of its own size, of those with as many sequences, and of all others. What slows a
# step down slows those down that are like it; were they left behind, further tokens would seem to cost nothing.
_OWN, _NEAR, _FAR = 0.3, 0.2, 0.05
# Of a step with one token, what a prompt's token is taken to cost before it is known.
_TYPICAL_PROMPT_TOKEN = 0.01


class AcceptanceRate:
    """Probability that a draft token is accepted, given that those before it were: decayed counts over a prior, by position."""

    __slots__ = ("_accepted", "_base", "_count", "_decay", "_expected", "_judged", "_prior", "_survival")

    def __init__(self, prior: AcceptanceRate | float, depth: int = MAX_DEPTH, *, decay: float = _DECAY) -> None:
        """The prior is one rate, or what is known of the drafter elsewhere, by position and as it is learned; `depth` are kept.

        With one rate, a position is taken to be like the one before it until more is known: what never comes to be judged, since
        the guesses before it fail, must not be believed in.
        With `decay` d at most 1 / (1 - d) drafts count, against a prior that counts as much as 4.
        """
        self._decay = decay
        self._base = None if isinstance(prior, float) else prior
        self._prior = [prior] * depth if isinstance(prior, float) else prior._rates(depth)
        self._count = 0
        self._accepted = [0.0] * depth
        self._judged = [0.0] * depth
        self._survival: list[float] | None = None
        self._expected: list[float] = []

    def observe(self, drafted: int, accepted: int) -> None:
        """One verified path; what follows the first miss was not judged."""
        judged, stood, decay = self._judged, self._accepted, self._decay
        known = drafted if drafted < len(judged) else len(judged)
        for i in range(accepted if accepted < known else known):
            judged[i] = judged[i] * decay + 1.0
            stood[i] = stood[i] * decay + 1.0
        if accepted < known:
            judged[accepted] = judged[accepted] * decay + 1.0
            stood[accepted] *= decay
        self._survival = None
        self._count += 1
        if self._base is not None and self._count % _PRIOR_KEPT == 0:
            # Else a drafter's first sequence would go on with hopes that were given up long ago.
            self._prior = self._base._rates(len(judged))

    @property
    def by_position(self) -> list[float]:
        return self._rates(len(self._prior))

    def _rates(self, depth: int) -> list[float]:
        known = zip(self._accepted[:depth], self._judged, self._prior, strict=False)
        if self._base is not None:
            return [(accepted + prior * _PRIOR_WEIGHT) / (judged + _PRIOR_WEIGHT) for accepted, judged, prior in known]
        rates: list[float] = []
        rate = self._prior[0]
        for accepted, judged, _ in known:
            rate = (accepted + rate * _PRIOR_WEIGHT) / (judged + _PRIOR_WEIGHT)
            rates.append(rate)
        return rates

    @property
    def survival(self) -> list[float]:
        """Probability that at least 1, 2, … draft tokens are accepted."""
        return self._refreshed() if self._survival is None else self._survival

    def _refreshed(self) -> list[float]:
        self._survival = survival = list(accumulate(self.by_position, mul))
        self._expected = list(accumulate(survival, initial=1.0))
        return survival

    def expected_tokens(self, depth: int) -> float:
        """Tokens that a step commits with `depth` draft tokens, its own included.

        The sum over what survives, which for one rate at all positions is (1 - a^(k+1)) / (1 - a) (Leviathan et al. 2023, eq. 1).
        """
        if self._survival is None:
            self._refreshed()
        expected = self._expected
        return expected[depth] if depth < len(expected) else expected[-1]

    def stands(self, count: int) -> float:
        """Probability that a draft has the next `count` tokens right; of as many as are known where that is fewer."""
        if count == 0:
            return 1.0
        survival = self.survival
        return survival[count - 1] if count < len(survival) else survival[-1]

    def depth_worth(self, price: float, limit: int) -> int:
        """The draft tokens whose chance of being committed is at least `price`; it falls with each position, so they come first."""
        depth = 0
        for survives in self.survival[:limit]:
            if survives < price:
                break
            depth += 1
        return depth


class Latency:
    """Median of the last few times a drafter took to answer, in seconds; 0 before the first.

    A median, since one answer that was late for a reason of its own (a cold start, a long prompt) should not keep the drafter from
    being asked again.
    """

    __slots__ = ("_samples", "value")

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=_SAMPLES)
        self.value = 0.0

    def observe(self, seconds: float) -> None:
        self._samples.append(seconds)
        self.value = median(self._samples)


class ForwardCost:
    """Seconds of a step by its sequences and tokens: a grid of forwards before the first request, corrected by every step.

    A step is a forward and all that is done on the host for it, of which there is more where drafts are judged.
    """

    def __init__(self) -> None:
        # By sequences, then by tokens of each sequence.
        self._grid: dict[float, dict[float, float]] = {}
        self._known: dict[tuple[int, int], float] = {}
        self.prompt_step_s = 0.0
        """What a step with a prompt takes besides."""
        self.prompt_token_s = 0.0
        """What each of a prompt's tokens adds to that."""

    def calibrate(self, sequence_count: int, token_count: int, seconds: float) -> None:
        """Note a forward that was measured on purpose; some time it took, whatever the clock says."""
        self._grid.setdefault(sequence_count, {})[token_count / sequence_count] = max(seconds, _LEAST_S)
        self._known.clear()

    def observe(self, sequence_count: int, token_count: int, seconds: float, prompt_token_count: int = 0) -> None:
        """Correct prices by a step: those of its size at once, all others a little, as contexts grow or others take cores.

        With tokens of prompts besides, what was not expected is divided between them and the others by the squares of what each is
        expected to take, as least mean squares do.
        """
        if not self._grid:
            if prompt_token_count == 0:
                self.calibrate(sequence_count, token_count, seconds)
            return
        decoding_s = self.estimate(sequence_count, token_count) if sequence_count else 0.0
        # What was never measured, or is far too low, must be able to grow.
        plain_s = self.estimate(1, 1)
        prompts_s = prompt_token_count * max(self.prompt_token_s, _TYPICAL_PROMPT_TOKEN * plain_s)
        expected = decoding_s + self._prompts_s(prompt_token_count)
        # One step that was held up says little, so no step counts for more than a factor of two.
        surprise = min(max(seconds, 0.5 * expected), 2.0 * max(expected, plain_s)) - expected
        share = prompts_s**2 / max(prompts_s**2 + decoding_s**2, 1e-18)
        if prompt_token_count:
            self.prompt_token_s = max(0.0, self.prompt_token_s + _NEAR * share * surprise / prompt_token_count)
        if sequence_count:
            self._correct(sequence_count, token_count, max(0.5, 1.0 + (1.0 - share) * surprise / max(decoding_s, 1e-9)))

    def calibrate_prompts(self, short: tuple[int, float], long: tuple[int, float]) -> None:
        """Note two forwards of a prompt alone, each as tokens and seconds."""
        self.prompt_token_s = max(0.0, long[1] - short[1]) / (long[0] - short[0])
        self.prompt_step_s = max(0.0, short[1] - self.estimate(1, 1) - short[0] * self.prompt_token_s)

    def _prompts_s(self, token_count: int) -> float:
        return self.prompt_step_s + token_count * self.prompt_token_s if token_count else 0.0

    def _correct(self, sequence_count: int, token_count: int, ratio: float) -> None:
        rows = _shares(self._grid, sequence_count)
        for count, row in self._grid.items():
            near, cells = rows.get(count, 0.0), _shares(row, token_count / sequence_count)
            for depth in row:
                own = near * cells.get(depth, 0.0)
                row[depth] *= ratio ** (_FAR + (_NEAR - _FAR) * near + (_OWN - _NEAR) * own)
        self._known.clear()

    def estimate(self, sequence_count: int, token_count: int) -> float:
        """Seconds of such a forward, between and beyond what was measured; 0 before that."""
        key = (sequence_count, token_count)
        if key not in self._known:
            depth = token_count / max(sequence_count, 1)
            about = _about(self._grid, sequence_count)
            self._known[key] = _between({n: _between(self._grid[n], depth) for n in about}, sequence_count) if about else 0.0
        return self._known[key]

    def further_tokens_s(self, sequence_count: int) -> list[tuple[int, float]]:
        """What tokens take beyond one of each sequence: up to how many of them, all in all, and how many seconds each; rising.

        Where forwards grow in steps, as with graphs of fixed sizes, a step is spread over all tokens that it has room for.
        """
        # The lower hull of what was measured (Andrew's monotone chain), between which prices are lines.
        hull = [(0, self.estimate(sequence_count, sequence_count))]
        for depth in sorted({depth for row in self._grid.values() for depth in row if depth > 1.0}):
            count = round(sequence_count * depth)
            point = (count - sequence_count, self.estimate(sequence_count, count))
            while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-2], point):
                hull.pop()
            if point[0] > hull[-1][0]:
                hull.append(point)
        return [(end[0], _slope(begin, end)) for begin, end in pairwise(hull)]


def _slope(begin: tuple[int, float], end: tuple[int, float]) -> float:
    return (end[1] - begin[1]) / (end[0] - begin[0])


def price_of_tokens(chances: list[float], token_prices: list[tuple[int, float]]) -> float:
    """The chance of being committed from which on draft tokens are worth their place, where what they cost rises.

    `chances` of all that could be drafted, in rising order; `token_prices` says up to how many of them cost how much each, in
    tokens. As many are worth it as have a chance of no less than the last of them costs.
    """
    begin, price = 0, 0.0
    for end, price in token_prices:
        count = len(chances) - bisect_left(chances, price)
        if count <= begin:
            # Those before cost less than their chances, those behind more than theirs.
            return chances[-begin] if begin else price
        if count < end:
            return price
        begin = end
    return price


def _about(points: Iterable[float], x: float) -> list[float]:
    """The two about `x`, or nearest to it if it lies outside; fewer where there are no more."""
    xs = sorted(points)
    i = min(max(bisect_left(xs, x), 1), len(xs) - 1)
    return xs[max(i - 1, 0) : i + 1]


def _between(points: dict[float, float], x: float) -> float:
    """The value at `x` on the line through the two nearest points about it; never less than the smallest point's."""
    xs = _about(points, x)
    if len(xs) == 1:
        return points[xs[0]]
    low, high = xs
    slope = (points[high] - points[low]) / (high - low)
    return max(points[low] + slope * (x - low), min(points.values()))


def _shares(points: Iterable[float], x: float) -> dict[float, float]:
    """How far each of the two points about `x` moves if the value there, between them, is to move by 1: the least squares."""
    xs = _about(points, x)
    if len(xs) == 1:
        return {xs[0]: 1.0}
    high = min(max((x - xs[0]) / (xs[1] - xs[0]), 0.0), 1.0)
    low = 1.0 - high
    squares = low * low + high * high
    return {xs[0]: low / squares, xs[1]: high / squares}


def steps_meanwhile(wait_s: float, plain_s: float) -> int:
    """Steps of `plain_s` to take before a draft is waited for that is `wait_s` away; 0 before anything was measured.

    At least one; of what is left, less than half a step is waited for.
    """
    return max(math.floor(wait_s / plain_s + 0.5), 1) if plain_s > 0.0 else 0


def goodput(tokens: float, forward_s: float, wait_s: float, busy_s: float, plain: tuple[float, float], stands: float) -> float:
    """Tokens a second with drafts that come `wait_s` after they were asked for, `busy_s` of which they take from the target.

    The better of two ways. To wait before each forward, which then commits `tokens`; or to go on meanwhile with steps of so many
    tokens and seconds (`plain`), after which the rest is waited for, and what was drafted is still right with the probability
    `stands`, or is asked for anew.
    """
    waiting = tokens / (forward_s + wait_s)
    if wait_s <= 0.0:
        return waiting
    plain_tokens, plain_s = plain
    steps = steps_meanwhile(wait_s, plain_s)
    meanwhile_s = max(steps * plain_s, wait_s)
    return max(waiting, (stands * tokens + steps * plain_tokens) / (stands * forward_s + busy_s + meanwhile_s))


def patience_s(gain: tuple[float, float], due_s: float, batch_rate: float, batch: int, plain_s: float, stands: float) -> float:
    """How long it is worth to wait for one sequence's draft, due in `due_s`, in a batch that commits `batch_rate` tokens a second.

    `gain`: tokens of the sequence that a step commits without it, and with it. Going on without brings so much less than the
    batch's usual rate, in each of the steps until the draft is there and while the rest is waited for, and again for each time that
    it then does not stand. But no draft is worth more than the tokens that come of it.
    """
    if batch_rate <= 0.0 or plain_s <= 0.0:
        return 0.0
    now, promised = gain
    steps = steps_meanwhile(due_s, plain_s)
    # Without `max` and `min`, whose calls take longer than the rest of it.
    rest_s = due_s - steps * plain_s
    missed_s = plain_s / batch - now / batch_rate
    going_on_s = (steps * missed_s if missed_s > 0.0 else 0.0) + (rest_s / batch if rest_s > 0.0 else 0.0)
    going_on_s /= stands if stands > 1e-6 else 1e-6
    most_s = (promised - now) / batch_rate
    return going_on_s if going_on_s < most_s else most_s
