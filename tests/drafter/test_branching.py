"""Branches are prepared where they are likely to be of use."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter_svc.branching import fan_out


@given(st.floats(0, 1), st.integers(0, 8), st.integers(0, 40))
def test_the_budget_is_spent_and_falls_with_the_place_but_for_the_last(
    acceptance: float, depth: int, budget: int
) -> None:
    counts = fan_out(acceptance, depth, budget)
    assert len(counts) == depth + 1
    assert sum(counts) == budget
    assert all(a >= b - 1 for a, b in pairwise(counts[:-1]))


def test_a_good_drafter_prepares_for_the_bonus_token_and_a_bad_one_for_a_miss_at_once() -> None:
    assert max(good := fan_out(0.95, 4, 20)) == good[-1]
    assert max(bad := fan_out(0.1, 4, 20)) == bad[0]


def test_counts_fall_by_the_root_of_the_acceptance_as_derived_for_an_exponent_of_one() -> None:
    counts = fan_out(0.64, 4, 1000)
    assert counts[1] / counts[0] == pytest.approx(0.8, abs=0.02)
