"""Measurements of a drafter: how often main guesses and siblings are right, and its latency."""

from __future__ import annotations

from collections import deque
from itertools import accumulate
from operator import mul
from statistics import median

from outrider.protocol.limits import MAX_DRAFT_TOKENS

_DECAY = 0.9
_PRIOR_WEIGHT = 4.0
_SAMPLES = 7
# Siblings have measurements for this many depths and ranks. Deeper siblings count at the last
# depth, and later siblings at the last rank.
_DEPTHS = 4
_RANKS = 8
# The prior says that claims are right, and weighs as much as this many claimed right guesses. The
# sums of claims and of right guesses decay by `_CLAIM_DECAY`.
_CLAIM_WEIGHT = 1.0
_CLAIM_DECAY = 0.995
# Prior share of wrong main guesses that have a right sibling, and the prior's weight in wrong main
# guesses.
_FIRST_SHARE = 0.4
_SHARE_WEIGHT = 4.0
_SHARE_DECAY = 0.99


class _FixedRate:
    """A prior that never changes, and has a rate only for the first position."""

    __slots__ = ("by_position", "version")

    def __init__(self, rate: float) -> None:
        self.by_position = [rate]
        self.version = 0


class AcceptanceRate:
    """For each position, the probability that a token is accepted if all tokens before it were.

    The rate is estimated from decayed counts and a prior.
    """

    __slots__ = (
        "_accepted",
        "_cumulative",
        "_decay",
        "_expected",
        "_judged",
        "_prior",
        "_rates",
        "_valid",
        "version",
    )

    def __init__(
        self, prior: AcceptanceRate | float, count: int = MAX_DRAFT_TOKENS, *, decay: float = _DECAY
    ) -> None:
        """Keep rates of `count` positions.

        The prior weighs as much as 4 drafts, and all observations together at most as much as
        1 / (1 - decay) drafts.

        If the prior is an AcceptanceRate, each position starts from the prior's rate at the same
        position, and follows this rate when it changes. If the prior is a number, or lacks the
        position, a position without data inherits the estimate of the position before it. Without
        this rule, positions that are never reached would keep an optimistic prior.
        """
        self._prior = _FixedRate(prior) if isinstance(prior, float) else prior
        self._decay = decay
        self._accepted = [0.0] * count
        self._judged = [0.0] * count
        self.version = 0
        """Grows with each draft that changes a rate."""
        # The lists below are valid while the versions of this rate and of its prior have this sum.
        self._valid = -1
        self._rates: list[float] = []
        self._cumulative: list[float] = []
        self._expected: list[float] = []

    def observe(self, drafted: int, accepted: int) -> None:
        """Count one draft of `drafted` tokens; its first `accepted` tokens were right."""
        judged = self._judged
        hits = self._accepted
        decay = self._decay
        known = drafted if drafted < len(judged) else len(judged)
        for i in range(accepted if accepted < known else known):
            judged[i] = judged[i] * decay + 1.0
            hits[i] = hits[i] * decay + 1.0
        if accepted < known:
            judged[accepted] = judged[accepted] * decay + 1.0
            hits[accepted] *= decay
        elif self._valid == self.version + self._prior.version and self._cumulative[-1] == 1.0:
            return  # all rates are 1, and a draft that is right to its end leaves them so
        self.version += 1

    @property
    def by_position(self) -> list[float]:
        """The acceptance rates of all positions."""
        if self._valid != self.version + self._prior.version:
            self._refresh()
        return self._rates

    @property
    def cumulative(self) -> list[float]:
        """The probabilities that at least 1, 2, … draft tokens are accepted."""
        if self._valid != self.version + self._prior.version:
            self._refresh()
        return self._cumulative

    def _refresh(self) -> None:
        self._valid = self.version + self._prior.version
        accepted = self._accepted
        judged = self._judged
        rates = [
            (a + prior * _PRIOR_WEIGHT) / (j + _PRIOR_WEIGHT)
            for a, j, prior in zip(accepted, judged, self._prior.by_position, strict=False)
        ]
        for i in range(len(rates), len(judged)):
            rates.append((accepted[i] + rates[-1] * _PRIOR_WEIGHT) / (judged[i] + _PRIOR_WEIGHT))
        self._rates = rates
        self._cumulative = list(accumulate(rates, mul))
        self._expected = list(accumulate(self._cumulative, initial=1.0))

    def expected_tokens(self, count: int) -> float:
        """Return how many tokens a step with `count` draft tokens commits on average.

        The result is 1, for the target's own token, plus the sum of the draft tokens' probabilities
        of acceptance. If all positions have the rate a, the result is (1 - a^(k+1)) / (1 - a) for k
        draft tokens (Leviathan et al. 2023, eq. 1).
        """
        if self._valid != self.version + self._prior.version:
            self._refresh()
        expected = self._expected
        return expected[count] if count < len(expected) else expected[-1]

    def prob_all_accepted(self, count: int) -> float:
        """Return the probability that the first `count` draft tokens are all accepted.

        For a draft beyond the known positions, it is the probability for all known positions.
        """
        if count == 0:
            return 1.0
        if self._valid != self.version + self._prior.version:
            self._refresh()
        cumulative = self._cumulative
        return cumulative[count - 1] if count < len(cumulative) else cumulative[-1]

    def tokens_worth(self, threshold: float, limit: int) -> int:
        """Return how many of `limit` draft tokens have at least `threshold` cumulative acceptance.

        Cumulative acceptance falls with each position, so these are the first draft tokens.
        """
        count = 0
        for prob in self.cumulative[:limit]:
            if prob < threshold:
                break
            count += 1
        return count


class SiblingRates:
    """Measures how far one drafter's claims about siblings hold at each depth and rank.

    A claim is an estimate, made before the commit, of the probability that a guess is right if its
    parent is right. The claim is the drafter's confidence, or a prior. A factor corrects claims:
    the number of right guesses divided by the sum of the claims. In both numbers, older guesses
    count less. The factor begins at 1.
    """

    __slots__ = ("_claimed", "_rescued", "_right", "_wrong", "rescued_share")

    def __init__(self) -> None:
        self._right = [0.0] * (_DEPTHS * _RANKS)
        self._claimed = [0.0] * (_DEPTHS * _RANKS)
        self._rescued = 0.0
        self._wrong = 0.0
        self.rescued_share = _FIRST_SHARE
        """Share of wrong main guesses that a sibling rescued, if a tree was asked for."""

    def observe(self, depth: int, rank: int, claim: float, right: bool) -> None:
        """Count a guess at `depth` whose parent was committed.

        `rank` is its place among the drafter's guesses after that parent, from 0.
        """
        at = _place(depth, rank)
        self._right[at] = self._right[at] * _CLAIM_DECAY + right
        self._claimed[at] = self._claimed[at] * _CLAIM_DECAY + claim

    def estimate(self, depth: int, rank: int, claim: float) -> float:
        """Return the corrected claim, at most 1."""
        at = _place(depth, rank)
        factor = (self._right[at] + _CLAIM_WEIGHT) / (self._claimed[at] + _CLAIM_WEIGHT)
        return min(claim * factor, 1.0)

    def added_tokens(self, prob_wrong: float) -> float:
        """Return the mean number of accepted tokens that a tree adds to its main path.

        The main path is wrong with the probability `prob_wrong`. Only the first token beside it
        counts. Later tokens would add more, but each has its cost too.
        """
        return prob_wrong * self.rescued_share

    def observe_wrong(self, rescued: bool) -> None:
        """Count a wrong main guess; `rescued` if a sibling was right and worth verifying."""
        self._rescued = self._rescued * _SHARE_DECAY + rescued
        self._wrong = self._wrong * _SHARE_DECAY + 1.0
        right = self._rescued + _FIRST_SHARE * _SHARE_WEIGHT
        self.rescued_share = right / (self._wrong + _SHARE_WEIGHT)


def _place(depth: int, rank: int) -> int:
    return min(depth, _DEPTHS - 1) * _RANKS + min(rank, _RANKS - 1)


class Latency:
    """Median of the last few durations of one kind, in seconds; 0 before the first.

    The value is a median because one answer that was late for a special reason, such as a cold
    start or a long prompt, should not keep the drafter from being asked.
    """

    __slots__ = ("_samples", "value")

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=_SAMPLES)
        self.value = 0.0

    def observe(self, seconds: float) -> None:
        """Add a duration."""
        self._samples.append(seconds)
        self.value = median(self._samples)
