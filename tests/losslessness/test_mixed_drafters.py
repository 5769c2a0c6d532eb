"""A sampling drafter beside another drafter leaves no trace in the output.

A drafter that knows a sequence's noise can make anything depend on the noise: the length of its
runs, or whether it drafts at all. If the verifier chose between this drafter's path and a sampled
path, the noise would decide which rule draws the next token. A sampling drafter may end a chain
because of the token that it just drew. If the length of a chain decided whether the chain is
verified, that token would decide.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from outrider.protocol.draft_tokens_policy import DraftTokensPolicy
from outrider.protocol.messages import AcceptanceRule, DraftDistribution
from tests.losslessness.chi_square import compare
from tests.losslessness.guesser import Guesser
from tests.losslessness.small import near, target_probs
from tests.losslessness.traffic import Traffic

DRAWS = 10_000
SEES = 0.06
STOPS: dict[str, Callable[[int, float], bool]] = {
    "stops before unlikely tokens": lambda token, probability: probability < 0.3,
    "drafts one token only": lambda token, probability: token != 2,
}


def drafters(stops: Callable[[int, float], bool], longest: int = 5) -> tuple[Guesser, Guesser]:
    """Return a drafter that samples, and a drafter with the target's noise and distribution."""
    samples = {DraftDistribution.ONE_HOT, DraftDistribution.SPARSE}
    couples = {DraftDistribution.ONE_HOT, DraftDistribution.COUPLED}
    always: Any = {"silent": 0.0, "shortest": 1}
    sparse = Guesser("sparse", near(target_probs), samples, longest=1, **always)
    coupled = Guesser("coupled", target_probs, couples, longest=longest, stops=stops, **always)
    return sparse, coupled


def check(traffic: Traffic, *present: Guesser) -> None:
    texts = traffic.run(DRAWS, *present)
    assert all(sum(drafter.proposed.values()) > 100 for drafter in present)
    compare(traffic.observed(texts), traffic.expected(DRAWS)).must_agree(SEES)


def make_traffic(rule: AcceptanceRule) -> Traffic:
    return Traffic(prompts=((1, 2),), rule=rule, policy=DraftTokensPolicy("fixed", 5))


# The quick suite tests that no request has both sampled and coupled drafters (test_rules.py).
@pytest.mark.slow
@pytest.mark.parametrize("rule", [AcceptanceRule.BLOCK, AcceptanceRule.TOKEN_WISE])
@pytest.mark.parametrize("stops", STOPS.values(), ids=STOPS)
def test_a_coupled_drafter_decides_nothing_beside_a_sampling_one(
    rule: AcceptanceRule, stops: Callable[[int, float], bool]
) -> None:
    check(make_traffic(rule), *drafters(stops))


@pytest.mark.slow
@pytest.mark.parametrize("rule", [AcceptanceRule.BLOCK, AcceptanceRule.TOKEN_WISE])
@pytest.mark.parametrize("late", ["sparse", "coupled"])
def test_a_coupled_drafter_decides_nothing_if_one_joins_mid_text(
    rule: AcceptanceRule, late: str
) -> None:
    traffic = make_traffic(rule)
    present = drafters(STOPS["stops before unlikely tokens"], longest=2)
    [joins] = [drafter for drafter in present if drafter.name == late]
    # The first token is committed before the drafter joins.
    traffic.in_waves = True
    traffic.first = 1
    traffic.length = 6

    def in_the_middle_of_each_wave(tick: int) -> None:
        if joins.connected and not traffic.engine.sequences:
            joins.leave()
        elif not joins.connected:
            joins.join(traffic.engine)

    traffic.events = in_the_middle_of_each_wave
    check(traffic, *present)


@pytest.mark.parametrize(
    "rule", [AcceptanceRule.BLOCK, pytest.param(AcceptanceRule.TOKEN_WISE, marks=pytest.mark.slow)]
)
def test_the_value_of_a_sampled_token_does_not_decide_which_path_is_verified(
    rule: AcceptanceRule,
) -> None:
    always: Any = {"silent": 0.0, "shortest": 5}
    samples = {DraftDistribution.ONE_HOT, DraftDistribution.SPARSE}
    guess = near(target_probs)
    sparse = Guesser("sparse", guess, samples, ends=lambda token: token == 1, **always)
    likeliest = Guesser("likeliest", target_probs, {DraftDistribution.ONE_HOT}, **always)
    check(make_traffic(rule), sparse, likeliest)
