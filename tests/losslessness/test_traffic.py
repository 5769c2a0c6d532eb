"""Whatever goes on around it, a text follows the target's law, and that of a seed stays the same.

Two drafters at once, drafts that run ahead and come late, pauses, small pools with preemption, prompts in chunks and from the
cache, drafters that come and go: all through the real engine, with a target of five tokens that can be enumerated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from chi_square import compare
from small import VOCAB, Guesser, Traffic, fixed_law, near, target_law
from virtual_time import VirtualClock

from outrider.clock import monotonic
from outrider.draft_tokens_policy import DraftTokensPolicy
from outrider.messages import AcceptanceRule, DraftDistribution

SPARSE = frozenset({DraftDistribution.ONE_HOT, DraftDistribution.SPARSE})
COUPLED = frozenset({DraftDistribution.ONE_HOT, DraftDistribution.COUPLED})
ONE_HOT = frozenset({DraftDistribution.ONE_HOT})
CLOSE, OTHER, POOR = near(target_law), near(target_law, 0.5, seed=2), near(target_law, 0.0, seed=3)


@dataclass
class Case:
    """Settings of the traffic, its drafters by what they offer, and what has to have happened for the case to mean anything."""

    drafters: Callable[[frozenset[DraftDistribution]], list[Guesser]]
    happened: Callable[[Traffic, list[Guesser]], bool] = lambda traffic, drafters: True
    settings: dict[str, Any] = field(default_factory=dict)
    events: Callable[[Traffic, list[Guesser], int], object] = lambda traffic, drafters, tick: None
    timed: bool = False

    def run(
        self, draws: int, offers: frozenset[DraftDistribution], **settings: Any
    ) -> tuple[Traffic, np.ndarray]:
        """The traffic, and what its requests generated."""
        clock = VirtualClock()
        traffic = Traffic(**{**self.settings, **settings}, clock=clock if self.timed else monotonic)
        drafters = self.drafters(offers)
        traffic.events = lambda tick: self.events(traffic, drafters, tick)
        if self.timed:
            traffic.model.takes = lambda token_count: clock.sleep(0.01 + 0.0003 * token_count)
        texts = traffic.run(draws, *drafters)
        assert self.happened(traffic, drafters), "this case no longer does what it is for"
        return traffic, texts


def come_and_go(traffic: Traffic, drafters: list[Guesser], tick: int) -> None:
    """By turns, so that a sequence may have lost its first drafter, or got it late, or again."""
    drafter = drafters[tick // 4 % len(drafters)]
    if tick % 4 == 3:
        drafter.leave() if drafter.connected else drafter.join(traffic.engine)


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
        lambda traffic, drafters: all(
            sum(drafter.proposed.values()) > 1000 for drafter in drafters
        ),
    ),
    "two drafters, depth auto": Case(
        two, settings={"policy": DraftTokensPolicy("auto", 5), "concurrent": 24}
    ),
    "pauses": Case(
        lambda offers: [
            Guesser("first", POOR, offers, late=1),
            Guesser("second", CLOSE, ONE_HOT, late=2),
        ],
        lambda traffic, drafters: (
            traffic.paused_ticks > 20
            and all(sum(drafter.proposed.values()) > 200 for drafter in drafters)
        ),
        {"policy": DraftTokensPolicy("goodput", 5), "always": False, "concurrent": 48, "length": 9},
        timed=True,
    ),
    "preemption, chunks and cached prefixes": Case(
        lambda offers: [Guesser("first", CLOSE, offers, late=1)],
        lambda traffic, drafters: (
            traffic.engine.scheduler.preemption_count > 50
            and traffic.engine.scheduler.cached_token_count > 1000
        ),
        {"page_size": 2, "page_count": 48, "concurrent": 16, "max_batch_tokens": 24, "length": 9},
    ),
    "joins and leaves": Case(
        lambda offers: [Guesser("first", CLOSE, offers, late=1), Guesser("second", OTHER, ONE_HOT)],
        events=come_and_go,
    ),
}
WAYS: dict[str, tuple[frozenset[DraftDistribution], AcceptanceRule]] = {
    "block": (SPARSE, AcceptanceRule.BLOCK),
    "token-wise": (SPARSE, AcceptanceRule.TOKEN_WISE),
    "coupled": (COUPLED, AcceptanceRule.BLOCK),
}


def check(case: Case, way: str, draws: int, sees: float) -> None:
    offers, rule = WAYS[way]
    traffic, texts = case.run(draws, offers, rule=rule)
    compare(traffic.observed(texts), traffic.expected(draws)).must_agree(sees)


@pytest.mark.parametrize("name", CASES)
def test_texts_follow_the_target_in_all_traffic(name: str) -> None:
    check(CASES[name], "block", 4_000, 0.081)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_texts_follow_the_target_over_many_draws(name: str, way: str) -> None:
    check(CASES[name], way, 20_000, 0.042)


@pytest.mark.parametrize("way", ["block", "coupled"])
@pytest.mark.parametrize("name", CASES)
def test_a_seed_gives_each_request_its_text_in_all_traffic(name: str, way: str) -> None:
    offers, rule = WAYS[way]
    seeds: dict[str, Any] = {
        "seed": lambda number: (number + 1) * 0x9E3779B97F4A7C15 % 2**64,
        "rule": rule,
    }
    plain = Traffic(**seeds, length=CASES[name].settings.get("length", 5)).run(600)
    assert len({tuple(text) for text in plain.tolist()}) > 300
    _, texts = CASES[name].run(600, offers, **seeds)
    assert texts.tolist() == plain.tolist()


EVEN = fixed_law(*[0.5, 0.5, *[0.0] * (VOCAB - 2)])
HEADS = fixed_law(*[0.9, 0.1, *[0.0] * (VOCAB - 2)])


@pytest.mark.parametrize(
    "rule", [AcceptanceRule.BLOCK, pytest.param(AcceptanceRule.TOKEN_WISE, marks=pytest.mark.slow)]
)
def test_the_engine_uses_no_coin_twice(
    rule: AcceptanceRule,
) -> None:
    """Whether a block ends early tells most about the coins behind its end where a drafter takes a fair coin for a loaded one."""
    traffic = Traffic(
        EVEN, prompts=((2,),), rule=rule, policy=DraftTokensPolicy("fixed", 4), length=4
    )
    texts = traffic.run(6_000, Guesser("heads", HEADS, SPARSE, silent=0.0))
    compare(traffic.observed(texts), traffic.expected(len(texts))).must_agree(sees=0.041)


def test_a_thousand_requests_without_a_seed_have_different_texts() -> None:
    """With 2^64 seeds none occurs twice; with a few hundred, most texts of 24 tokens would."""
    texts = Traffic(
        fixed_law(*[1 / VOCAB] * VOCAB), prompts=((2,),), length=24
    ).run_with_the_systems_seeds(1_000)
    assert len({tuple(text) for text in texts.tolist()}) == 1_000
