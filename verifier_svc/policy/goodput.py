"""The arithmetic of goodput, committed tokens over time. Pure functions of numbers; see `planner` for how they are used.

A draft token is worth its place in a forward while its chance of being committed is above the price:
the tokens that the same time brings elsewhere. Raising a ratio by such prices, anew from each step's
outcome, is Dinkelbach's method (On nonlinear fractional programming, 1967).
"""

from __future__ import annotations

import math
from bisect import bisect_left


def price_of_tokens(chances: list[float], token_prices: list[tuple[int, float]]) -> float:
    """The lowest chance of being committed at which a draft token still pays, given rising costs.

    Takes the n likeliest tokens, with n the largest number whose n-th chance covers the n-th cost.
    `chances` of all tokens that could be drafted, in rising order. `token_prices` are pairs: up to
    how many draft tokens of a forward cost how much each, in tokens.
    """
    begin, price = 0, 0.0
    for end, price in token_prices:
        count = len(chances) - bisect_left(chances, price)
        if count <= begin:
            # The tokens before this place are worth their cost, and those behind it are not.
            return chances[-begin] if begin else price
        if count < end:
            return price
        begin = end
    return price


def steps_meanwhile(wait_s: float, decode_step_s: float) -> int:
    """Steps of `decode_step_s` seconds to take before the engine waits for a draft that is `wait_s` away.

    At least one, and then the engine waits for less than half a step; 0 before anything was measured.
    """
    return max(math.floor(wait_s / decode_step_s + 0.5), 1) if decode_step_s > 0.0 else 0


def goodput(
    tokens: float,
    forward_s: float,
    wait_s: float,
    busy_s: float,
    plain: tuple[float, float],
    stands: float,
) -> tuple[float, bool]:
    """Tokens a second with drafts that come `wait_s` after they are asked for; and whether to wait.

    The better of two ways. Wait before each forward, which then commits `tokens`. Or go on meanwhile
    with steps of so many tokens and seconds (`plain`), then wait for the rest; the draft is still
    right with the probability `stands`, or else the drafter is asked anew. The target loses `busy_s`
    of the second way to drafting on its own cores; in the first way it waits for them anyway.
    """
    waiting = tokens / (forward_s + wait_s)
    if wait_s <= 0.0:
        return waiting, True
    plain_tokens, decode_step_s = plain
    steps = steps_meanwhile(wait_s, decode_step_s)
    meanwhile_s = max(steps * decode_step_s, wait_s)
    going_on = (stands * tokens + steps * plain_tokens) / (
        stands * forward_s + busy_s + meanwhile_s
    )
    return (waiting, True) if waiting >= going_on else (going_on, False)


def max_wait_s(
    gain: tuple[float, float],
    due_s: float,
    batch_rate: float,
    batch: int,
    decode_step_s: float,
    stands: float,
) -> float:
    """How long one sequence's draft is worth waiting for, in a batch of `batch_rate` tokens a second.

    The draft is due in `due_s`. `gain` is tokens of the sequence that a step commits without it, and
    with it. Each step without the draft falls behind the batch's usual rate, and so does the rest of
    the wait; and again for each time that the draft then does not stand. But no draft is worth more
    than the tokens that come of it.
    """
    if batch_rate <= 0.0 or decode_step_s <= 0.0:
        return 0.0
    now, promised = gain
    steps = steps_meanwhile(due_s, decode_step_s)
    # Comparisons instead of `max` and `min`, whose calls take longer than the rest of it.
    rest_s = due_s - steps * decode_step_s
    missed_s = decode_step_s / batch - now / batch_rate
    going_on_s = (steps * missed_s if missed_s > 0.0 else 0.0) + (
        rest_s / batch if rest_s > 0.0 else 0.0
    )
    going_on_s /= stands if stands > 1e-6 else 1e-6
    most_s = (promised - now) / batch_rate
    return going_on_s if going_on_s < most_s else most_s
