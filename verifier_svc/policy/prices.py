"""Prices of draft tokens in a forward of the present batch, in tokens."""

from __future__ import annotations

from typing import NamedTuple

from verifier_svc.policy.forward_cost import ForwardCost

# Least cost of a draft token, in plain steps of one sequence. On a large model the measured cost of
# a few tokens can be 0.
_LEAST_PRICE = 0.005


class Prices(NamedTuple):
    """Costs of forwards of the present batch."""

    batch: int
    """Decoding sequences."""
    decode_step_s: float
    """Seconds of a step without drafts; 0 before anything was measured."""
    rate: float
    """Tokens a second that the batch commits, by the last plan's speedup."""
    token_prices: list[tuple[int, float]]
    """Rising costs: (up to this many draft tokens of the forward, cost of each in tokens)."""
    limit: int
    """Most draft tokens of a sequence."""


def current_prices(
    cost: ForwardCost, batch: int, speedup: float, limit: int, *, beside_prompts: bool
) -> Prices:
    """The prices for a batch that commits `speedup` times the tokens of plain decoding.

    In a forward with prompt tokens, a draft token costs at least as much as a prompt token, even if
    a few draft tokens alone would cost almost nothing. The prompt's own time is no part of the
    batch's rate: it has to be spent with drafts and without.
    """
    decode_step_s = cost.estimate(batch, batch)
    rate = speedup * batch / decode_step_s if decode_step_s > 0.0 else 0.0
    least_s = _LEAST_PRICE * decode_step_s / batch
    if beside_prompts:
        least_s = max(least_s, cost.prompt_token_s)
    further = cost.further_tokens_s(batch) or [(1, 0.0)]
    token_prices = [(count, rate * max(seconds, least_s)) for count, seconds in further]
    return Prices(batch, decode_step_s, rate, token_prices, limit)
