"""A drafter's acceptance is measured by position, and its latency by answers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifier_svc.state.acceptance_rate import AcceptanceRate, Latency


def test_acceptance_is_measured_by_position() -> None:
    rate = AcceptanceRate(0.6, 4)
    assert rate.by_position == pytest.approx([0.6] * 4)
    for _ in range(100):
        rate.observe(drafted=4, accepted=1)
    first, second, *unjudged = rate.by_position
    assert first > 0.85
    assert second < 0.3
    assert unjudged == pytest.approx([second] * 2), "the rate of the last measured position"


def test_a_good_sequence_gets_long_drafts_from_a_bad_drafter() -> None:
    drafter = AcceptanceRate(0.8, decay=0.99)
    for _ in range(200):
        drafter.observe(drafted=4, accepted=0)
    good = AcceptanceRate(drafter, 8)
    for _ in range(60):
        count = max(1, good.tokens_worth(0.15, 8))
        good.observe(drafted=count, accepted=count)
        drafter.observe(drafted=count, accepted=count)
    assert good.tokens_worth(0.15, 8) == 8


def test_a_drafters_first_sequence_loses_the_optimistic_prior_with_it() -> None:
    drafter = AcceptanceRate(0.8)
    first = AcceptanceRate(drafter, 8)
    for _ in range(40):
        first.observe(drafted=8, accepted=0)
        drafter.observe(drafted=8, accepted=0)
    assert first.by_position[0] < 0.1
    assert first.expected_tokens(8) < 1.1


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8)), max_size=60), st.floats(0.0, 1.0))
def test_cumulative_acceptance_falls_with_position(
    drafts: list[tuple[int, int]], threshold: float
) -> None:
    rate = AcceptanceRate(0.8, 8)
    for drafted, accepted in drafts:
        rate.observe(drafted, min(drafted, accepted))
    assert rate.cumulative == sorted(rate.cumulative, reverse=True)
    count = rate.tokens_worth(threshold, 8)
    assert all(prob >= threshold for prob in rate.cumulative[:count])
    assert all(prob < threshold for prob in rate.cumulative[count:])


def test_one_late_answer_does_not_change_a_drafters_latency() -> None:
    latency = Latency()
    for seconds in (0.001, 5.0, 0.002):
        latency.observe(seconds)
    assert latency.value == 0.002
