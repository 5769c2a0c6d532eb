"""The simulator's drafters offer alternatives, which are right as often as the settings say."""

from __future__ import annotations

import asyncio

import pytest

from outrider.protocol.draft_messages import Opened, Proposal, Window
from outrider.protocol.messages import DraftDistribution, SamplingParams
from outrider_bench.simulator.costs import DraftingCost
from outrider_bench.simulator.family import SimulatedFamily
from outrider_bench.simulator.scenario import DrafterSpec
from outrider_bench.simulator.world import DrawnText, World
from tests.family_rig import Rig

ACCEPTANCE = 0.5
ALTERNATIVES = [0.5, 0.4]
COUNT = 400


def proposals(seed: int, tree_tokens: int = 12) -> list[tuple[DrawnText, Proposal]]:
    """Return each text with the first proposal for it."""
    world = World(seed)
    spec = DrafterSpec(name="d", acceptance={"": [ACCEPTANCE]}, alternatives=ALTERNATIVES)
    rig = Rig(SimulatedFamily(spec, world, DraftingCost(round_s=0.0, token_s={1: 0.0})))
    texts = [DrawnText(number, "", 1, 50) for number in range(COUNT)]
    for text in texts:
        world.add(text)
        opened = Opened(
            text.number,
            [text.number],
            SamplingParams(0.0),
            DraftDistribution.ONE_HOT,
            Window(tree_tokens or 4, 4),
            4,
            tree_tokens=tree_tokens,
        )
        rig.open(opened)
    sent = asyncio.run(rig.draft()).proposals
    return list(zip(texts, sent, strict=True))


def test_alternatives_are_right_as_often_as_set() -> None:
    right = [0, 0]
    confidences: list[float] = []
    for text, proposal in proposals(1):
        assert proposal.parents.count(0) == 3
        first, *others = (i for i, parent in enumerate(proposal.parents) if parent == 0)
        wrong = proposal.token_ids[first] != text.tokens[0]
        confidences.append(proposal.confidences[first])
        for rank, i in enumerate(others):
            right[rank] += wrong and proposal.token_ids[i] == text.tokens[0]
    assert set(confidences) == {ACCEPTANCE}
    assert right[0] / COUNT == pytest.approx(0.25, abs=0.08)
    assert right[1] / COUNT == pytest.approx(0.1, abs=0.06)
