"""The arithmetic of goodput (committed tokens per second) and of the costs of draft tokens.

A draft token is worth its place in a forward if its probability of being committed is at least its
cost: the number of tokens that the batch commits in the time that the draft token takes. The
planner makes this comparison each step with the rate of the step before, which is Dinkelbach's
method for maximising a ratio (On nonlinear fractional programming, 1967).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import NamedTuple

from verifier_svc.policy.forward_cost import ForwardCost

# Least cost of a draft token, as a part of one sequence's share of a plain step. On a large model
# the measured cost of a few tokens can be 0.
_LEAST_COST = 0.005


class StepCosts(NamedTuple):
    """Costs of forwards of the present batch."""

    batch: int
    """Decoding sequences."""
    decode_step_s: float
    """Seconds of a step without drafts; 0 before anything was measured."""
    rate: float
    """Tokens a second that the batch commits, according to the last plan's speedup."""
    token_costs: list[tuple[int, float]]
    """Rising costs: (up to this many draft tokens of the forward, cost of each in tokens)."""
    limit: int
    """The maximum number of draft tokens of a sequence."""


def step_costs(
    cost: ForwardCost, batch: int, speedup: float, limit: int, *, beside_prompts: bool
) -> StepCosts:
    """Return the costs for a batch that commits `speedup` times the tokens of plain decoding.

    In a forward with prompt tokens, a draft token costs at least as much as a prompt token, even if
    a few draft tokens would cost almost nothing in a forward without prompts. The prompt's own time
    is no part of the batch's rate, since it is spent with or without drafts.
    """
    decode_step_s = cost.estimate(batch, batch)
    rate = speedup * batch / decode_step_s if decode_step_s > 0.0 else 0.0
    least_s = _LEAST_COST * decode_step_s / batch
    if beside_prompts:
        least_s = max(least_s, cost.prompt_token_s)
    further = cost.further_tokens_s(batch) or [(1, 0.0)]
    token_costs = [(count, rate * max(seconds, least_s)) for count, seconds in further]
    return StepCosts(batch, decode_step_s, rate, token_costs, limit)


def acceptance_threshold(accept_probs: list[float], token_costs: list[tuple[int, float]]) -> float:
    """Return the lowest probability of being committed at which a draft token still pays.

    Tokens are taken from the likeliest on, each at a cost not below the cost of the token before
    it, until a token's probability no longer covers its cost. `accept_probs` are the probabilities
    of all tokens that could be drafted, in rising order. `token_costs` is as in `StepCosts`.
    """
    begin = 0
    threshold = 0.0
    for end, threshold in token_costs:
        count = len(accept_probs) - bisect_left(accept_probs, threshold)
        if count <= begin:
            # The tokens before this place are worth their cost, and the tokens after it are not.
            return accept_probs[-begin] if begin else threshold
        if count < end:
            return threshold
        begin = end
    return threshold


def steps_meanwhile(wait_s: float, decode_step_s: float) -> int:
    """Return how many steps to take before the engine waits for a draft that is due in `wait_s`.

    A step takes `decode_step_s` seconds. The number is at least 1, but 0 before anything was
    measured. The number is rounded, so after these steps the wait is at most half a step.
    """
    return max(math.floor(wait_s / decode_step_s + 0.5), 1) if decode_step_s > 0.0 else 0


def goodput(
    tokens: float,
    forward_s: float,
    wait_s: float,
    busy_s: float,
    plain: tuple[float, float],
    prob_all_accepted: float,
) -> tuple[float, bool]:
    """Return tokens a second with drafts that arrive after `wait_s`, and whether to wait for them.

    Compares two plans. The first plan waits before each forward of `forward_s` seconds, which
    commits `tokens`. The second plan takes plain steps meanwhile, `plain` = (tokens, seconds) each,
    and then waits for the rest of `wait_s`. Then the draft is still right with the probability
    `prob_all_accepted`; otherwise the drafter is asked anew. Drafting on the target's own cores
    costs the second plan `busy_s`; the first plan waits for it anyway.
    """
    waiting = tokens / (forward_s + wait_s)
    if wait_s <= 0.0:
        return waiting, True
    plain_tokens, decode_step_s = plain
    steps = steps_meanwhile(wait_s, decode_step_s)
    meanwhile_s = max(steps * decode_step_s, wait_s)
    going_on = (prob_all_accepted * tokens + steps * plain_tokens) / (
        prob_all_accepted * forward_s + busy_s + meanwhile_s
    )
    return (waiting, True) if waiting >= going_on else (going_on, False)


def max_wait_s(
    gain: tuple[float, float],
    due_s: float,
    batch_rate: float,
    batch: int,
    decode_step_s: float,
    prob_all_accepted: float,
) -> float:
    """Return how many seconds of waiting one sequence's pending draft is worth.

    The draft is due in `due_s`. The batch of `batch` sequences commits `batch_rate` tokens a
    second. `gain` has the sequence's tokens that a step commits without the draft, and with it.

    Going on without the draft costs plain steps, which commit less than the batch's usual rate, and
    then the rest of the wait. After those steps the draft is still right with the probability
    `prob_all_accepted`. If it is wrong, the same cost is due again for the next draft. The wait is
    worth that cost, but no more than the tokens that the draft adds.
    """
    if batch_rate <= 0.0 or decode_step_s <= 0.0:
        return 0.0
    now, promised = gain
    steps = steps_meanwhile(due_s, decode_step_s)
    # The lines below use comparisons, because calls of `max` and `min` would take longer than all
    # other lines of this function.
    rest_s = due_s - steps * decode_step_s
    missed_s = decode_step_s / batch - now / batch_rate
    going_on_s = steps * missed_s if missed_s > 0.0 else 0.0
    if rest_s > 0.0:
        going_on_s += rest_s / batch
    going_on_s /= prob_all_accepted if prob_all_accepted > 1e-6 else 1e-6
    most_s = (promised - now) / batch_rate
    return going_on_s if going_on_s < most_s else most_s
