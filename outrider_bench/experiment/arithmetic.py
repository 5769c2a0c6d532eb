"""The gain of speculative decoding by theory: pure functions of acceptance and measured times.

Knows no simulator. Times are in seconds, speeds are multiples of plain decoding. The symbols are

    a  acceptance: chance that a draft token is accepted if those before it are
    k  depth: draft tokens in a round
    E  block efficiency: tokens that a round commits
    p  plain step: a forward of one token a sequence, and the host's work
    v  verifying step: a forward of k + 1 tokens a sequence, and the host's work
    d  drafting: d = c₀ + k·c, with c₀ for a round and c for a token
    r  round trip between verifier and drafter
    h  hit rate: chance that the next draft is there when a round ends
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from outrider_bench.simulator.costs import Costs

MAX_DRAFT_TOKENS = 16
PAYS = 1.02
"""Drafting pays from this multiple of plain decoding on."""
MAX_ROUND_TRIP_S = 1.0
MAX_ACCEPTANCE = 0.99
_BISECTIONS = 40


@dataclass(frozen=True, slots=True)
class Times:
    """Times of a batch: `verify_s[k]` is v with k draft tokens, and `verify_s[0]` is p."""

    verify_s: tuple[float, ...]
    draft_round_s: float
    draft_token_s: float
    round_trip_s: float

    @property
    def decode_step_s(self) -> float:
        """p, the time of a plain step."""
        return self.verify_s[0]

    def draft_s(self, depth: int) -> float:
        """d = c₀ + k·c."""
        return self.draft_round_s + depth * self.draft_token_s


def step_s(costs: Costs, batch: int, depth: int) -> float:
    """Seconds of a step that verifies `depth` draft tokens of each of `batch` sequences."""
    host_s = costs.plan_step_s + costs.host_step_s
    each_s = costs.plan_sequence_s + costs.host_sequence_s
    return costs.forward_s(batch, batch * (depth + 1)) + host_s + batch * each_s


def block_efficiency(acceptance: float, depth: int) -> float:
    """E = (1 − a^(k+1)) / (1 − a): expected tokens of a round.

    Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding"
    (arXiv 2211.17192), equation 1.
    """
    if acceptance >= 1.0:
        return depth + 1.0
    return (1.0 - acceptance ** (depth + 1)) / (1.0 - acceptance)


@dataclass(frozen=True, slots=True)
class Estimate:
    """The gain of one way of using a drafter at a depth."""

    way: str
    depth: int
    tokens: float
    """Tokens of a mean step."""
    step_s: float
    """Seconds of a mean step."""
    hit_rate: float
    undrafted_share: float
    """Share of the steps that verify no draft."""
    speed: float


def synchronous(times: Times, acceptance: float, depth: int) -> Estimate:
    """Each round waits for its draft: E tokens in v + d + r. Drafting in the verifier has r = 0."""
    return _overlapped("synchronous hop", times, acceptance, depth, 0.0)


def chain(times: Times, acceptance: float, depth: int) -> Estimate:
    """The drafter runs ahead of the verdict (PEARL, arXiv 2408.11850).

    With probability h = a^(k+1) all k tokens and the guess behind them are accepted. Then the next
    draft was made meanwhile and the round takes max(v, d + r), else v + d + r.
    """
    return _overlapped("chain that runs ahead", times, acceptance, depth, acceptance ** (depth + 1))


def pushed(times: Times, acceptance: float, depth: int, hit_rate: float) -> Estimate:
    """A bound: the drafter pushes drafts for a round's likely outcomes before the verdict.

    One of them fits with probability h (SSD/Saguaro, arXiv 2603.03251).
    """
    return _overlapped("pushed outcomes, a bound", times, acceptance, depth, hit_rate)


def late(times: Times, acceptance: float, depth: int) -> Estimate:
    """The verifier does not wait: it takes m = ⌈(d + r) / p⌉ plain steps until the draft comes.

    With probability a^m the draft begins with the m tokens of these steps. Then the verifier
    verifies the rest of it. The figures are means of m + 1 steps. Outrider uses late drafts so.
    """
    plain_s = times.decode_step_s
    steps = math.ceil((times.draft_s(depth) + times.round_trip_s) / plain_s - 1e-9)
    left = max(depth - steps, 0)
    tokens = steps + 1 + acceptance**steps * (block_efficiency(acceptance, left) - 1)
    seconds = steps * plain_s + times.verify_s[left]
    count = steps + 1
    speed = tokens * plain_s / seconds
    share = steps / count
    way = "late draft, no waiting"
    return Estimate(way, depth, tokens / count, seconds / count, 0.0, share, speed)


def _overlapped(way: str, times: Times, acceptance: float, depth: int, hit_rate: float) -> Estimate:
    verify_s = times.verify_s[depth]
    draft_s = 0.0
    if depth:
        draft_s = times.draft_s(depth) + times.round_trip_s
    step_s = hit_rate * max(verify_s, draft_s) + (1.0 - hit_rate) * (verify_s + draft_s)
    tokens = block_efficiency(acceptance, depth)
    speed = tokens * times.decode_step_s / step_s
    return Estimate(way, depth, tokens, step_s, hit_rate, 0.0, speed)


Way = Callable[[Times, float, int], Estimate]
"""A function of times, acceptance and depth."""
Strategy = Callable[[Times, float], Estimate]
"""A function of times and acceptance."""


def best(way: Way, times: Times, acceptance: float) -> Estimate:
    """The estimate at the fastest depth. Depth 0 is plain decoding, so the speed is at least 1."""
    estimates = [way(times, acceptance, depth) for depth in range(len(times.verify_s))]
    return max(estimates, key=_speed)


def expected(times: Times, acceptance: float) -> Estimate:
    """The better of waiting for each draft and of waiting for none.

    In neither does the drafter run ahead of the verdict.
    """
    return max([best(way, times, acceptance) for way in (synchronous, late)], key=_speed)


def taking_turns(times: Times, acceptance: float) -> Estimate:
    """Drafting and verifying on the same cores: synchronous."""
    return best(synchronous, times, acceptance)


def _speed(estimate: Estimate) -> float:
    return estimate.speed


def break_even_round_trip_s(strategy: Strategy, times: Times, acceptance: float) -> float | None:
    """The longest round trip in seconds at which drafting pays.

    None if it never pays, infinity if it pays at `MAX_ROUND_TRIP_S`.
    """

    def speed(round_trip_s: float) -> float:
        return strategy(replace(times, round_trip_s=round_trip_s), acceptance).speed

    return longest_that_pays(speed, 0.0, MAX_ROUND_TRIP_S, _BISECTIONS)


def break_even_acceptance(strategy: Strategy, times: Times) -> float | None:
    """The lowest acceptance at which drafting pays; None if it does not at `MAX_ACCEPTANCE`."""

    def speed(acceptance: float) -> float:
        return strategy(times, acceptance).speed

    return lowest_that_pays(speed, MAX_ACCEPTANCE, _BISECTIONS)


def longest_that_pays(
    speed: Callable[[float], float], low: float, high: float, bisections: int
) -> float | None:
    """The largest value between `low` and `high` that pays, of a speed that falls with it.

    None if `low` does not pay, infinity if `high` pays. The search is geometric if `low` > 0.
    """
    if speed(low) < PAYS:
        return None
    if speed(high) >= PAYS:
        return math.inf
    for _ in range(bisections):
        middle = math.sqrt(low * high) if low > 0.0 else (low + high) / 2
        if speed(middle) >= PAYS:
            low = middle
        else:
            high = middle
    return low


def lowest_that_pays(speed: Callable[[float], float], high: float, bisections: int) -> float | None:
    """The least value that pays, of a speed that rises with it; None if `high` does not pay."""
    if speed(high) < PAYS:
        return None
    low = 0.0
    for _ in range(bisections):
        middle = (low + high) / 2
        if speed(middle) >= PAYS:
            high = middle
        else:
            low = middle
    return high
