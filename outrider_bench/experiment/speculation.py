"""Rates of speculative decoding by theory: drafting and verifying in turn (SI), or at once (DSI).

In all formulas v is the time of a target forward and c that of a draft token, both in seconds; a
is the acceptance and k the number of draft tokens of a step.
"""

from __future__ import annotations

from outrider_bench.experiment.arithmetic import block_efficiency


def si_rate(v: float, c: float, a: float, k: int) -> float:
    """Tokens a second of speculative inference (SI): k tokens are drafted, then verified."""
    return block_efficiency(a, k) / (v + k * c)


def dsi_rate(v: float, c: float, a: float, k: int) -> float:
    """Tokens a second of DSI with as many target servers as it can use.

    From one rejection to the next n guesses are right, with probability (1 - a) a^n, and n + 1
    tokens are committed. Drafting goes on while blocks of k are verified, so that a run waits only
    for the last block's verification. It never takes longer than plain decoding, which starts at
    the same time (Timor et al. 2024, algorithm 1).
    """
    seconds, tokens, chance = 0.0, 0.0, 1.0 - a
    n = 0
    while chance > 1e-12:
        blocks = n // k + (n > 0)
        seconds += chance * min(v + blocks * k * c, (n + 1) * v)
        tokens += chance * (n + 1)
        chance *= a
        n += 1
    return tokens / seconds


def pearl_tokens(a: float, k: int) -> float:
    """Tokens of PEARL for each target forward, with windows of k draft tokens.

    While the target computes, the drafter makes the next k tokens. After a rejection the target
    first verifies one token, then k at a time until the next one. So n right guesses, and the
    target's own token behind them, take one forward and one more for each k of them, rounded up.
    The drafter never makes the target wait (Liu et al. 2025, algorithm 2).
    """
    # The i-th of the further forwards runs if at least (i - 1) k + 1 guesses are right.
    forwards = 1.0 + a / (1.0 - a**k)
    return 1.0 / (1.0 - a) / forwards


def acceptance_of(rate: float, v: float, c: float, k: int) -> float:
    """The acceptance at which SI has this rate, by bisection.

    Raises ValueError if no acceptance gives it.
    """
    low, high = 0.0, 1.0 - 1e-9
    if not si_rate(v, c, low, k) <= rate <= si_rate(v, c, high, k):
        raise ValueError(f"no acceptance gives {rate} tokens/s with {k} draft tokens")
    for _ in range(60):
        middle = (low + high) / 2
        if si_rate(v, c, middle, k) < rate:
            low = middle
        else:
            high = middle
    return low
