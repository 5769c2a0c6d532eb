"""Trees that drafters offer for the next step: their size, and the confidences of their tokens."""

from __future__ import annotations

import math

from outrider.drafter.draft_sequence import DraftSequence
from outrider.protocol.draft_messages import Proposal, Verdict, Window
from tests.family_rig import opened_sequence

CHAIN = Window(token_count=4, depth=4)
TREE = Window(token_count=16, depth=4)
AHEAD = Window(token_count=40, depth=9)


def sequence(window: Window = TREE, tree_tokens: int = 10) -> DraftSequence:
    """Return a sequence for which the verifier takes chains of 4 tokens."""
    return DraftSequence(opened_sequence(1, [7], window, 4, tree_tokens=tree_tokens))


def confidences_of(proposal: Proposal | None) -> list[float]:
    assert proposal is not None
    return proposal.confidences


def test_each_token_of_a_proposal_has_its_confidence() -> None:
    drafted = sequence()
    drafted.extend([1, 2], confidences=[0.5, 0.25])
    drafted.branch(1, [3, 4], [0.125, 0.75])
    proposal = drafted.take_proposal()
    assert proposal is not None
    assert (proposal.token_ids, proposal.parents) == ([1, 2, 3, 4], [0, 1, 1, 3])
    assert proposal.confidences == [0.5, 0.25, 0.125, 0.75]


def test_a_sibling_without_confidence_is_less_likely() -> None:
    drafted = sequence()
    drafted.extend([1, 2], confidences=[0.5, 0.25])
    drafted.branch(1, [3, 4])
    beside = (1.0 - drafted.acceptance) / 2.0
    expected = [0.5, 0.25, beside, drafted.acceptance]
    assert confidences_of(drafted.take_proposal()) == expected


def test_confidences_stay_within_the_wires_range() -> None:
    drafted = sequence()
    drafted.extend([1, 2, 3, 4], confidences=[0.0, -1.0, 1.5, math.nan])
    assert confidences_of(drafted.take_proposal()) == [1e-6, 1e-6, 1.0, 1e-6]


def test_confidences_move_along_with_a_commit() -> None:
    drafted = sequence()
    drafted.extend([1, 2, 3], confidences=[0.5, 0.25, 0.75])
    drafted.branch(1, [4, 5], [0.125, 0.0625])
    drafted.advance_or_rewind(Verdict(1, 2, [1], 1, 4, tree_tokens=10))
    assert drafted.confidences == [0.25, 0.75]
    drafted.advance_or_rewind(Verdict(1, 3, [4], 1, 4, tree_tokens=10))
    assert (drafted.guesses, drafted.confidences) == ([5], [0.0625])


def test_a_tree_has_as_many_tokens_as_the_verifier_asks_for() -> None:
    drafted = sequence()
    assert drafted.tree_room == 0
    drafted.extend([1, 2, 3, 4])
    assert drafted.tree_room == drafted.branch_room == 6
    for token in range(10, 14):
        drafted.branch(0, [token, 8])
    assert drafted.tree_room == 0
    proposal = drafted.take_proposal()
    assert proposal is not None
    assert len(proposal.token_ids) == 10


def test_a_chain_that_runs_ahead_has_room_for_a_tree_for_each_step() -> None:
    drafted = sequence(AHEAD)
    drafted.extend([1, 2, 3, 4])
    assert drafted.tree_room == 6
    drafted.extend([5, 6, 7, 8])
    assert drafted.tree_room == 2 * 10 - 8
    assert drafted.branch_room == AHEAD.token_count - 8


def test_no_tree_unless_the_verifier_asks_for_one() -> None:
    for drafted in (sequence(tree_tokens=0), sequence(tree_tokens=4), sequence(CHAIN)):
        drafted.extend([1, 2, 3, 4])
        assert drafted.branch_room == 0
    asked = sequence()
    asked.extend([1, 2, 3, 4])
    asked.advance_or_rewind(Verdict(1, 2, [1], 1, 4))
    assert not asked.wants_tree
    assert asked.tree_room == 0


def test_a_committed_branch_is_sent_again_from_its_first_unsent_guess_on() -> None:
    """A branch grew after it was sent. When it becomes the chain, its new guess is sent too."""
    drafted = sequence()
    drafted.extend([1, 2])
    drafted.branch(0, [3, 4])
    assert drafted.take_proposal() is not None
    drafted.branch(0, [3, 4, 5])
    drafted.advance_or_rewind(Verdict(1, 2, [3], 0, 4, tree_tokens=10))
    assert drafted.guesses == [4, 5]
    proposal = drafted.take_proposal()
    assert proposal is not None
    assert (proposal.base_length, proposal.token_ids) == (2, [4, 5])
