"""Branches are spread over the places where they are most likely to be committed."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter_svc.branching import Branch, fan_out, offer_likeliest
from outrider.drafter.draft_sequence import DraftSequence
from outrider.protocol.draft_messages import Window
from tests.family_rig import opened_sequence


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


def test_likely_tokens_behind_one_shared_token_are_offered_with_it_once() -> None:
    window = Window(16, 4)
    sequence = DraftSequence(opened_sequence(1, [1, 2], window, 2, tree_tokens=6))
    sequence.extend([3, 4], confidences=[0.5, 0.5])
    beside = [
        Branch(0, [5], [0.4]),
        Branch(0, [6], [0.1]),
        Branch(0, [5, 7], [0.4, 0.6], shared=1),
        Branch(0, [5, 8], [0.4, 0.3], shared=1),
        Branch(0, [6, 9], [0.1, 0.9], shared=1),
    ]
    offer_likeliest(sequence, beside)
    proposal = sequence.take_proposal()
    assert proposal is not None
    # Four branches are committed with probability 0.4, 0.24, 0.12 and 0.1. The fifth branch, with
    # 0.09, has no room.
    assert sorted(proposal.token_ids) == [3, 4, 5, 6, 7, 8]
    parent = dict(zip(proposal.token_ids, proposal.parents, strict=True))
    assert parent[7] == parent[8] == proposal.token_ids.index(5) + 1
