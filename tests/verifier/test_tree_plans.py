"""Plans with trees: room for branches, a second drafter for a sequence, trials of large drafts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outrider.protocol.draft_messages import DraftBatch, Proposal
from outrider.protocol.draft_tokens_policy import DraftTokensPolicy
from outrider.protocol.messages import DraftDistribution, TokenRequest
from outrider.protocol.token_tree import MAX_TREE_TOKENS
from tests.verifier.fake_model import GREEDY, Client, ScriptedDrafter, make_engine, make_plan
from tests.virtual_time import VirtualClock
from verifier_svc.drafts.draft_message import DraftMessage
from verifier_svc.engine.config import EngineConfig
from verifier_svc.engine.loop import Engine
from verifier_svc.state.acceptance_rate import AcceptanceRate
from verifier_svc.state.sequence import Assignment

TREES = EngineConfig(DraftTokensPolicy(), draft_trees=True)


def planned(
    config: EngineConfig = TREES, quick_s: float = 0.001, quick_rate: float = 0.5
) -> Engine:
    """Return an engine with one sequence and two drafters: "good" takes 5 ms, "quick" `quick_s`."""
    engine, _ = make_engine(eos_bias=-99, page_count=256, config=config, clock=VirtualClock())
    for name in ("good", "quick"):
        ScriptedDrafter(engine, name, name).prove()
    for drafted in (0, 8, 64):
        engine.cost.calibrate(1, 1 + drafted, 0.05 + 0.0005 * drafted)
    engine.submit(TokenRequest([1, 2], 100, GREEDY), Client())
    engine.step()
    for name, rate, seconds in (("good", 0.8, 0.005), ("quick", quick_rate, quick_s)):
        found = assignment(engine, name)
        found.asked = True
        found.rate = AcceptanceRate(rate, 8)
        found.drafter_rates[0] = found.rate
        found.drafter.round_trip.observe(seconds)
    return engine


def assignment(engine: Engine, name: str) -> Assignment:
    [sequence] = engine.sequences.values()
    return sequence.assignments[name]


def asked(engine: Engine) -> set[str]:
    """Return the drafters that the last of five plans asks."""
    return {each.drafter.id for each in make_plan(engine, 5).asks}


@pytest.mark.parametrize("quick_s", [0.001, 0.006])
def test_a_drafter_that_pays_is_asked_beside_the_chosen_one(quick_s: float) -> None:
    assert asked(planned(quick_s=quick_s)) == {"good", "quick"}


def test_a_second_drafter_is_not_asked_where_it_costs_or_adds_too_little() -> None:
    assert asked(planned(quick_rate=0.001)) == {"good"}
    engine = planned()
    drafter = assignment(engine, "quick").drafter
    drafter.on_target_device = True
    drafter.token_time.observe(0.005)
    assert asked(engine) == {"good"}


def test_without_trees_a_drafter_that_costs_little_stands_in_for_the_chosen_one() -> None:
    engine = planned(replace(TREES, draft_trees=False))
    assert asked(engine) == {"good", "quick"}
    plan = make_plan(engine, 6)
    assert [each.drafter.id for _, each in plan.wait_for] != ["quick"]


@pytest.mark.parametrize("on_target_device", [False, True])
def test_verdicts_ask_for_a_tree_only_where_one_may_be_verified(on_target_device: bool) -> None:
    for trees in (False, True):
        engine = planned(replace(TREES, draft_trees=trees))
        good = assignment(engine, "good")
        good.drafter.on_target_device = on_target_device
        make_plan(engine, 5)
        good.drafter.outbox.verdicts.clear()
        [sequence] = engine.sequences.values()
        sequence.tokens.append(3)
        engine.drafting.send_verdicts(sequence, [3], None, sequence.span)
        [verdict] = good.drafter.outbox.verdicts
        if trees:
            assert verdict.draft_tokens < verdict.tree_tokens <= MAX_TREE_TOKENS
            assert good.window.token_count >= verdict.tree_tokens
        else:
            assert verdict.tree_tokens == 0
            assert good.window.token_count == good.window.depth or not on_target_device


def test_a_drafter_without_right_guesses_beside_is_asked_for_chains() -> None:
    engine = planned()
    good = assignment(engine, "good")
    assert make_plan(engine, 5).tree_tokens[good] > 0
    for _ in range(500):
        good.sibling_rates.observe_wrong(False)
    assert good not in make_plan(engine, 5).tree_tokens
    for _ in range(100):
        good.sibling_rates.observe_wrong(True)
    assert good in make_plan(engine, 5).tree_tokens


def test_drafting_time_is_that_of_the_new_tokens_one_behind_the_other() -> None:
    """A proposal repeats its chain, and branches are drafted in parallel."""
    engine = planned()
    [sequence] = engine.sequences.values()
    good = assignment(engine, "good")
    base = len(sequence.tokens)
    good.trie.add(Proposal(sequence.id, base, [3, 4, 5]), sequence.tokens)
    good.expect_answer(base)
    message = DraftMessage(good.drafter, 0.0, engine.sequences)
    tree = Proposal(sequence.id, base, [3, 4, 5, 6, 6, 7, 6], [0, 1, 2, 3, 0, 5, 1])
    message.take(DraftBatch([tree]))
    assert message.draft_length == 2


def test_sampled_drafts_are_planned_and_measured_as_chains() -> None:
    engine = planned()
    [sequence] = engine.sequences.values()
    good = assignment(engine, "good")
    good.distribution = DraftDistribution.SPARSE
    assert make_plan(engine, 32).tree_tokens == {}
    before = good.sibling_rates.rescued_share
    base = len(sequence.tokens)
    good.trie.add(Proposal(sequence.id, base, [3, 4], [0, 0]), sequence.tokens)
    sequence.tokens.append(5)
    engine.drafting.send_verdicts(sequence, [5], good, sequence.span)
    assert good.sibling_rates.rescued_share == before
