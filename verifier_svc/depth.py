"""What a draft is worth: measured acceptance, measured times, and so whether it pays to draft and how long to wait for it."""

from __future__ import annotations

from collections import deque
from statistics import median

_DECAY = 0.9
_PRIOR_WEIGHT = 4.0
_SAMPLES = 7


class AcceptanceRate:
    """Probability that the next draft token is accepted, given that those before it were: a decayed count over a prior."""

    __slots__ = ("_accepted", "_judged", "_prior")

    def __init__(self, prior: float) -> None:
        self._prior = prior
        self._accepted = 0.0
        self._judged = 0.0

    def observe(self, drafted: int, accepted: int) -> None:
        """One verified path; what follows the first miss was not judged."""
        self._accepted = self._accepted * _DECAY + accepted
        self._judged = self._judged * _DECAY + min(accepted + 1, drafted)

    @property
    def value(self) -> float:
        return (self._accepted + self._prior * _PRIOR_WEIGHT) / (self._judged + _PRIOR_WEIGHT)


class Average:
    """Exponentially weighted mean of a measured time, in seconds; None before the first measurement."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float | None = None

    def observe(self, seconds: float) -> None:
        self.value = seconds if self.value is None else self.value + (1 - _DECAY) * (seconds - self.value)


class Latency:
    """Median of the last few times a drafter took to answer, in seconds; 0 before the first.

    A median, since one answer that was late for a reason of its own (a cold start, a long prompt) should not keep the drafter from
    being asked again.
    """

    __slots__ = ("_samples",)

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=_SAMPLES)

    def observe(self, seconds: float) -> None:
        self._samples.append(seconds)

    @property
    def value(self) -> float:
        return median(self._samples) if self._samples else 0.0


class ForwardCost:
    """Measured seconds of a forward by its number of tokens, in buckets of powers of two."""

    def __init__(self) -> None:
        self._by_bucket: dict[int, Average] = {}

    def observe(self, token_count: int, seconds: float) -> None:
        self._by_bucket.setdefault(token_count.bit_length(), Average()).observe(seconds)

    def estimate(self, token_count: int) -> float:
        """Seconds of a forward of about this size, from the nearest bucket measured; 0 before the first."""
        if not self._by_bucket:
            return 0.0
        nearest = min(self._by_bucket, key=lambda bucket: abs(bucket - token_count.bit_length()))
        return self._by_bucket[nearest].value or 0.0


def expected_tokens(acceptance: float, depth: int) -> float:
    """Tokens a step commits with `depth` draft tokens: (1 - a^(k+1)) / (1 - a) (Leviathan et al. 2023, equation 1)."""
    if acceptance >= 1.0:
        return depth + 1.0
    return float((1.0 - acceptance ** (depth + 1)) / (1.0 - acceptance))


def wait_budget_s(forward_s: float, certain_tokens: float, awaited_tokens: float) -> float:
    """Longest wait after which a step with the awaited drafts is still no slower than one without them.

    A step now commits `certain_tokens` in `forward_s`; after a wait it commits `awaited_tokens` more. Equal rates give the limit.
    """
    return forward_s * awaited_tokens / certain_tokens if certain_tokens > 0 else 0.0


def speculation_pays(acceptance: float, depth: int, plain_s: float, verify_s: float, latency_s: float) -> bool:
    """Whether a step that waits for a draft and verifies it commits tokens at a higher rate than plain steps do."""
    return expected_tokens(acceptance, depth) * plain_s > latency_s + verify_s
