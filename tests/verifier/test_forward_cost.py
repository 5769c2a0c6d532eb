"""Costs of forwards come from trials and steps; costs of tokens follow from them."""

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifier_svc.policy.forward_cost import ForwardCost
from verifier_svc.policy.goodput import acceptance_threshold


def test_marginal_costs_rise_and_spread_a_jump_over_its_tokens() -> None:
    cost = ForwardCost()
    for drafted, seconds in ((0, 0.030), (1, 0.036), (3, 0.068), (6, 0.116)):
        cost.calibrate(8, 8 * (1 + drafted), seconds)
    assert rounded(cost.further_tokens_s(8)) == [(8, 0.00075), (48, 0.002)]
    jumping = ForwardCost()
    for drafted, seconds in ((0, 0.030), (1, 0.038), (3, 0.038), (6, 0.053)):
        jumping.calibrate(1, 1 + drafted, seconds)
    assert rounded(jumping.further_tokens_s(1)) == [(3, 0.00267), (6, 0.005)]
    assert ForwardCost().further_tokens_s(1) == []


def rounded(token_costs: list[tuple[int, float]]) -> list[tuple[int, float]]:
    return [(count, round(seconds, 5)) for count, seconds in token_costs]


@given(
    st.lists(st.floats(0.0, 1.0), max_size=40).map(sorted),
    st.lists(st.tuples(st.integers(1, 20), st.floats(0.0, 1.0)), min_size=1, max_size=4),
)
def test_no_other_choice_of_tokens_is_worth_more(
    probs: list[float], segments: list[tuple[int, float]]
) -> None:
    ends = list(accumulate(count for count, _ in segments))
    rising = list(zip(ends, sorted(cost for _, cost in segments), strict=True))
    each = [
        cost
        for begin, (end, cost) in zip([0, *ends], rising, strict=False)
        for _ in range(end - begin)
    ]

    def worth(count: int) -> float:
        costs = each[:count] + [each[-1]] * (count - len(each))
        return sum(sorted(probs, reverse=True)[:count]) - sum(costs)

    threshold = acceptance_threshold(probs, rising)
    # Tokens whose probability equals the threshold may be taken or not.
    fewest = sum(prob > threshold for prob in probs)
    most = sum(prob >= threshold for prob in probs)
    best = max(worth(count) for count in range(len(probs) + 1))
    assert max(worth(count) for count in range(fewest, most + 1)) == pytest.approx(best)


def test_steps_correct_the_cost_of_their_own_size_most() -> None:
    cost = ForwardCost()
    for batch in (1, 32):
        cost.calibrate(batch, batch, 0.1)
    for _ in range(10):
        cost.observe(1, 1, 0.15)
    own = cost.estimate(1, 1)
    assert own == pytest.approx(0.15, rel=0.15)
    assert 0.1 < cost.estimate(32, 32) < own


@pytest.mark.parametrize(
    "token_s", [0.0, 1e-8, 0.02], ids=["never measured", "far too low", "far too high"]
)
def test_a_wrong_prompt_cost_is_corrected_by_mixed_steps_alone(token_s: float) -> None:
    cost = ForwardCost()
    for tokens in (8, 72):
        cost.calibrate(8, tokens, 0.012 + 0.0002 * tokens)
    cost.prompt_token_s = token_s
    for i in range(600):
        tokens = 8 + 5 * i % 40
        prompt = 10 + 37 * i % 300
        cost.observe(8, tokens, 0.012 + 0.0002 * tokens + 0.0004 * prompt, prompt)
    assert cost.prompt_token_s == pytest.approx(0.0004, rel=0.3)
    assert cost.estimate(8, 24) == pytest.approx(0.012 + 0.0002 * 24, rel=0.4)


def test_a_prompts_fixed_cost_does_not_enter_its_token_cost() -> None:
    cost = ForwardCost()
    cost.calibrate(1, 1, 0.010)
    cost.calibrate_prompts((64, 0.030 + 64 * 1e-5), (256, 0.030 + 256 * 1e-5))
    for _ in range(100):
        cost.observe(1, 1, 0.010)
        cost.observe(1, 1, 0.030 + 10 * 1e-5, 10)
    assert cost.prompt_token_s == pytest.approx(1e-5, rel=0.3)
