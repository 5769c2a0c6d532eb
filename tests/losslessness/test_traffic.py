"""In all traffic, texts follow the target's distribution, and a seed gives the same text.

The traffic has two drafters at once, drafts that run ahead and come late, pauses, small pools with
preemption, prompts in chunks and from the cache, drafters that die and join, and a verifier that
dies. All of it passes through the real engine, with a target that has a vocabulary of five tokens,
so that texts can be enumerated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from outrider.process.clock import monotonic
from outrider.protocol.draft_tokens_policy import DraftTokensPolicy
from outrider.protocol.messages import AcceptanceRule, DraftDistribution
from tests.losslessness.chi_square import compare
from tests.losslessness.guesser import Guesser
from tests.losslessness.small import VOCAB, fixed, near, target_probs
from tests.losslessness.traffic import Traffic, seed_of
from tests.virtual_time import VirtualClock

SPARSE = frozenset({DraftDistribution.ONE_HOT, DraftDistribution.SPARSE})
COUPLED = frozenset({DraftDistribution.ONE_HOT, DraftDistribution.COUPLED})
ONE_HOT = frozenset({DraftDistribution.ONE_HOT})
CLOSE = near(target_probs)
OTHER = near(target_probs, 0.5, seed=2)
POOR = near(target_probs, 0.0, seed=3)


@dataclass
class Case:
    """One kind of traffic."""

    drafters: Callable[[frozenset[DraftDistribution]], list[Guesser]]
    """Makes drafters that offer the given distributions."""
    happened: Callable[[Traffic, list[Guesser]], bool] = lambda traffic, drafters: True
    """True if the traffic had the events that the case is for."""
    settings: dict[str, Any] = field(default_factory=dict)
    events: Callable[[Traffic, list[Guesser], int], object] = lambda traffic, drafters, tick: None
    timed: bool = False
    """True if forwards take time on a virtual clock."""

    def run(
        self, draws: int, offers: frozenset[DraftDistribution], **settings: Any
    ) -> tuple[Traffic, np.ndarray]:
        """Return the traffic, and the tokens that its requests generated, [draws, length]."""
        clock = VirtualClock()
        traffic = Traffic(**{**self.settings, **settings}, clock=clock if self.timed else monotonic)
        drafters = self.drafters(offers)
        traffic.events = lambda tick: self.events(traffic, drafters, tick)
        if self.timed:
            traffic.model.takes = lambda token_count: clock.sleep(0.01 + 0.0003 * token_count)
        texts = traffic.run(draws, *drafters)
        assert self.happened(traffic, drafters), "the events that the case is for did not happen"
        return traffic, texts


def drafters_die_and_join(traffic: Traffic, drafters: list[Guesser], tick: int) -> None:
    """Drafters die and join in turn; a sequence may lose its drafter, or get it late or again."""
    drafter = drafters[tick // 4 % len(drafters)]
    if tick % 4 == 3:
        if drafter.connected:
            drafter.leave()
        else:
            drafter.join(traffic.engine)


def verifier_dies(traffic: Traffic) -> None:
    """Cancel all sequences, and continue them as at another verifier."""
    for sequence in list(traffic.engine.sequences.values()):
        traffic.engine.cancel(sequence)
        committed = sequence.tokens[len(sequence.request.prompt) :]
        again = replace(sequence.request, committed=committed, noise_seed=sequence.seed)
        traffic.engine.submit(again, sequence.sink)


def two(offers: frozenset[DraftDistribution], **settings: Any) -> list[Guesser]:
    return [
        Guesser("first", CLOSE, offers, **settings),
        Guesser("second", OTHER, ONE_HOT, **settings),
    ]


CASES = {
    "ahead and late, with branches": Case(
        lambda offers: [Guesser("first", CLOSE, offers, late=2, branches=True)],
        lambda traffic, drafters: (
            traffic.engine.drafting.rejections == [] and drafters[0].connected
        ),
    ),
    "two drafters": Case(
        two,
        lambda traffic, drafters: all(sum(drafter.proposed.values()) > 500 for drafter in drafters),
        # By the real clock of a busy machine, the second drafter may be too slow to be asked.
        timed=True,
    ),
    "two drafters, policy auto": Case(
        two, settings={"policy": DraftTokensPolicy("auto", 5), "concurrent": 24}
    ),
    "pauses": Case(
        lambda offers: [
            Guesser("first", POOR, offers, late=1),
            Guesser("second", CLOSE, ONE_HOT, late=2),
        ],
        lambda traffic, drafters: (
            traffic.paused_ticks > 10
            and all(sum(drafter.proposed.values()) > 100 for drafter in drafters)
        ),
        {"policy": DraftTokensPolicy("goodput", 5), "always": False, "concurrent": 48, "length": 9},
        timed=True,
    ),
    "preemption, chunks and cached prefixes": Case(
        lambda offers: [Guesser("first", CLOSE, offers, late=1)],
        lambda traffic, drafters: (
            traffic.engine.scheduler.preemption_count > 30
            and traffic.engine.scheduler.cached_token_count > 500
        ),
        {"page_size": 2, "page_count": 48, "concurrent": 16, "max_batch_tokens": 24, "length": 9},
    ),
    "the verifier dies": Case(
        lambda offers: [Guesser("first", CLOSE, offers, late=1)],
        lambda traffic, drafters: traffic.engine._book._last_id > 700,
        {"concurrent": 24, "length": 9},
        lambda traffic, drafters, tick: verifier_dies(traffic) if tick % 3 == 2 else None,
    ),
    "drafters die and join": Case(
        lambda offers: [Guesser("first", CLOSE, offers, late=1), Guesser("second", OTHER, ONE_HOT)],
        events=drafters_die_and_join,
    ),
}
RULES = {"block": AcceptanceRule.BLOCK, "token-wise": AcceptanceRule.TOKEN_WISE}


def check(case: Case, way: str, draws: int, sees: float) -> None:
    traffic, texts = case.run(draws, SPARSE, rule=RULES[way])
    compare(traffic.observed(texts), traffic.expected(draws)).must_agree(sees)


# In the quick suite, test_the_engine_uses_no_coin_twice has a verifier that dies. Its target shows
# more about the coins. The other kinds of traffic are in the slow test of many draws.
def test_texts_follow_the_target_in_difficult_traffic() -> None:
    check(CASES["preemption, chunks and cached prefixes"], "block", 4_000, 0.081)


# Block and token-wise verification differ only in a step's acceptance, which does not depend on
# traffic; test_exact_step.py enumerates it. So the cases alternate between the two rules. With
# coupled draws, a request always has the same text, as the test below shows.
MANY = [(name, ("block", "token-wise")[i % 2]) for i, name in enumerate(CASES)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "way"), MANY)
def test_texts_follow_the_target_over_many_draws(name: str, way: str) -> None:
    check(CASES[name], way, 20_000, 0.042)


@pytest.mark.parametrize("name", CASES)
def test_a_seed_gives_each_request_its_text_in_all_traffic(name: str) -> None:
    plain = Traffic(seed=seed_of, length=CASES[name].settings.get("length", 5)).run(400)
    assert len({tuple(text) for text in plain.tolist()}) > 200
    _, texts = CASES[name].run(400, COUPLED, seed=seed_of)
    assert texts.tolist() == plain.tolist()


EVEN = fixed(0.5, 0.5, *[0.0] * (VOCAB - 2))
HEADS = fixed(0.9, 0.1, *[0.0] * (VOCAB - 2))


@pytest.mark.parametrize(
    ("rule", "dies"),
    [
        (AcceptanceRule.BLOCK, True),
        pytest.param(AcceptanceRule.BLOCK, False, marks=pytest.mark.slow),
        pytest.param(AcceptanceRule.TOKEN_WISE, True, marks=pytest.mark.slow),
        pytest.param(AcceptanceRule.TOKEN_WISE, False, marks=pytest.mark.slow),
    ],
)
def test_the_engine_uses_no_coin_twice(rule: AcceptanceRule, dies: bool) -> None:
    """The target throws a fair coin, and the drafter takes it for a loaded one.

    Here the end of a block reveals the most about the coins after it. A verifier that continues a
    sequence does not know which coins were used before.
    """
    traffic = Traffic(
        EVEN, prompts=((2,),), rule=rule, policy=DraftTokensPolicy("fixed", 4), length=4
    )
    if dies:
        traffic.events = lambda tick: verifier_dies(traffic)
    texts = traffic.run(6_000, Guesser("heads", HEADS, SPARSE, silent=0.0))
    compare(traffic.observed(texts), traffic.expected(len(texts))).must_agree(sees=0.041)


def test_a_thousand_requests_without_a_seed_have_different_texts() -> None:
    """Of 2^64 seeds, none is drawn twice. Of a few hundred, most would be drawn twice."""
    traffic = Traffic(fixed(*[1 / VOCAB] * VOCAB), prompts=((2,),), length=24)
    texts = traffic.run_with_the_systems_seeds(1_000)
    assert len({tuple(text) for text in texts.tolist()}) == 1_000
