"""No decision of a step depends on how long a sampled draft is.

A drafter may have ended the draft after a token because of the token's value. All tests run in
virtual time.
"""

from __future__ import annotations

import numpy as np
import pytest

from outrider.protocol.draft_messages import Proposal, SparseDistribution
from outrider.protocol.messages import DraftDistribution, TokenRequest
from tests.verifier.fake_model import Client, ScriptedDrafter, make_engine, make_plan
from tests.virtual_time import VirtualClock

SAMPLES = frozenset({DraftDistribution.ONE_HOT, DraftDistribution.SPARSE})
HALVES = SparseDistribution(np.array([3, 4]), np.array([0.5, 0.5]))


@pytest.mark.parametrize("waited_for", ["sampling", "other"])
def test_no_wait_depends_on_the_length_of_a_sampled_draft(waited_for: str) -> None:
    engine, _ = make_engine(eos_bias=-99, trust=True, clock=VirtualClock())
    sampling = ScriptedDrafter(engine, "sampling", "sampling", distributions=SAMPLES)
    other = ScriptedDrafter(engine, "other", "other")
    for tokens, seconds in ((0, 0.05), (8, 0.052)):
        engine.cost.calibrate(1, 1 + tokens, seconds)
    sequence = engine.submit(TokenRequest([1, 2], 90), Client())
    engine.drain_inbox()
    for drafter in (sampling, other):
        drafter.skip(sequence.id)
        drafter.handle.round_trip.observe(0.004)
    engine.step()
    sequence.assignments[waited_for].rate.observe(4, 4)
    for assignment in sequence.assignments.values():
        assignment.asked = True

    def waits() -> tuple[list[str], float]:
        plan = make_plan(engine)
        return [assignment.drafter.id for _, assignment in plan.wait_for], plan.wait_s

    make_plan(engine, 3)
    assert waited_for in waits()[0]
    found = []
    for length in (1, 2, 4):
        sequence.assignments["sampling"].trie.add(
            Proposal(sequence.id, len(sequence.tokens), [3] * length, [], [HALVES] * length),
            sequence.tokens,
        )
        found.append(waits())
    assert found == [found[-1]] * 3


@pytest.mark.parametrize("length", [1, 2, 3, 8])
def test_of_a_sampled_draft_a_full_cache_verifies_what_fits(length: int) -> None:
    engine, _ = make_engine(page_count=3, page_size=2, eos_bias=-99, trust=True)
    drafter = ScriptedDrafter(engine, distributions=SAMPLES)
    sequence = engine.submit(TokenRequest([1, 2], 4), Client())
    engine.drain_inbox()
    engine.step()
    drafter.send(Proposal(sequence.id, 3, [3] * length, [], [HALVES] * length))
    # Three pages of two tokens; three tokens are committed.
    [scheduled] = engine.scheduler.next({sequence.id: 8})
    assert len(scheduled.draft.token_ids) == min(length, 3)
