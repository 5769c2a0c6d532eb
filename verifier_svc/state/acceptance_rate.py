"""Measurements of a drafter: the share of its tokens that is accepted, and its latency."""

from __future__ import annotations

from collections import deque
from statistics import median

from outrider.limits import MAX_DRAFT_TOKENS

_DECAY = 0.9
_PRIOR_WEIGHT = 4.0
_SAMPLES = 7


class AcceptanceRate:
    """Probability that a draft token is accepted if those before it were: decayed counts over a prior, by position."""

    __slots__ = (
        "_accepted",
        "_base",
        "_decay",
        "_expected",
        "_first",
        "_judged",
        "_rates",
        "_survival",
        "_valid",
        "_version",
    )

    def __init__(
        self, prior: AcceptanceRate | float, count: int = MAX_DRAFT_TOKENS, *, decay: float = _DECAY
    ) -> None:
        """The prior counts as 4 drafts, the drafts themselves as at most 1 / (1 - `decay`); `count` positions are kept.

        With another rate as the prior, each position follows that rate's position, as it learns. With a number, or beyond the
        prior's positions, a position without data inherits the estimate of the position before it. Otherwise positions that are
        never reached would keep an optimistic prior.
        """
        self._base = None if isinstance(prior, float) else prior
        self._first = prior if isinstance(prior, float) else 0.0
        self._decay = decay
        self._accepted = [0.0] * count
        self._judged = [0.0] * count
        self._version = 0
        # Sums of versions, its own and the prior's, at which the lists below hold.
        self._valid = -1
        self._rates: list[float] = []
        self._survival: list[float] = []
        self._expected: list[float] = []

    def observe(self, drafted: int, accepted: int) -> None:
        """One path of which so many tokens were judged, up to the first miss."""
        judged, stood, decay = self._judged, self._accepted, self._decay
        known = drafted if drafted < len(judged) else len(judged)
        for i in range(accepted if accepted < known else known):
            judged[i] = judged[i] * decay + 1.0
            stood[i] = stood[i] * decay + 1.0
        if accepted < known:
            judged[accepted] = judged[accepted] * decay + 1.0
            stood[accepted] *= decay
        self._version += 1

    @property
    def by_position(self) -> list[float]:
        """The rates of all positions."""
        if self._stale():
            self._refresh()
        return self._rates

    @property
    def survival(self) -> list[float]:
        """Probability that at least 1, 2, … draft tokens are accepted."""
        if self._stale():
            self._refresh()
        return self._survival

    def _stale(self) -> bool:
        base = self._base
        return self._valid != (self._version if base is None else self._version + base._version)

    def _refresh(self) -> None:
        base = self._base
        self._valid = self._version if base is None else self._version + base._version
        priors = None if base is None else base.by_position
        rates: list[float] = []
        survival: list[float] = []
        expected = [1.0]
        rate, survives, total = self._first, 1.0, 1.0
        for i, judged in enumerate(self._judged):
            prior = priors[i] if priors is not None and i < len(priors) else rate
            rate = (self._accepted[i] + prior * _PRIOR_WEIGHT) / (judged + _PRIOR_WEIGHT)
            survives *= rate
            total += survives
            rates.append(rate)
            survival.append(survives)
            expected.append(total)
        self._rates, self._survival, self._expected = rates, survival, expected

    def expected_tokens(self, count: int) -> float:
        """Tokens that a step commits with `count` draft tokens, its own included.

        The sum over what survives, which for one rate at all positions is (1 - a^(k+1)) / (1 - a) (Leviathan et al. 2023, eq. 1).
        """
        if self._stale():
            self._refresh()
        expected = self._expected
        return expected[count] if count < len(expected) else expected[-1]

    def all_accepted(self, count: int) -> float:
        """Probability that `count` draft tokens are all accepted; of as many as are known where that is fewer."""
        if count == 0:
            return 1.0
        survival = self.survival
        return survival[count - 1] if count < len(survival) else survival[-1]

    def tokens_worth(self, price: float, limit: int) -> int:
        """The draft tokens whose chance of being committed is at least `price`; it falls with each position."""
        count = 0
        for survives in self.survival[:limit]:
            if survives < price:
                break
            count += 1
        return count


class Latency:
    """Median of the last few times a drafter took to answer, in seconds; 0 before the first.

    A median, since one answer that was late for a reason of its own (a cold start, a long prompt) should not keep the drafter
    from being asked again.
    """

    __slots__ = ("_samples", "value")

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=_SAMPLES)
        self.value = 0.0

    def observe(self, seconds: float) -> None:
        self._samples.append(seconds)
        self.value = median(self._samples)
