"""Branches are spread over the places where they are most likely to be committed."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter_svc.branching import fan_out


@given(st.floats(0, 1), st.integers(0, 8), st.integers(0, 40))
def test_counts_sum_to_the_budget_and_fall_up_to_the_last_place(
    acceptance: float, depth: int, budget: int
) -> None:
    counts = fan_out(acceptance, depth, budget)
    assert len(counts) == depth + 1
    assert sum(counts) == budget
    assert all(a >= b - 1 for a, b in pairwise(counts[:-1]))


def test_high_acceptance_branches_last_and_low_acceptance_first() -> None:
    assert max(good := fan_out(0.95, 4, 20)) == good[-1]
    assert max(bad := fan_out(0.1, 4, 20)) == bad[0]


def test_counts_fall_by_the_root_of_the_acceptance() -> None:
    counts = fan_out(0.64, 4, 1000)
    assert counts[1] / counts[0] == pytest.approx(0.8, abs=0.02)
