"""A drafter whose acceptance is a setting: on the stack's own rules, and as it is predicted."""

import asyncio
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from made_up_profile import made_up_profile

from outrider.drafter.draft_sequence import DraftSequence
from outrider.protocol.draft_messages import DraftDistribution, Opened, Window
from outrider.protocol.messages import SamplingParams
from outrider_bench.experiment import measuring
from outrider_bench.experiment.cell_scenarios import scenario_of
from outrider_bench.experiment.load import LEARNING, Played
from outrider_bench.experiment.records import DRAFTED
from outrider_bench.experiment.spec import Experiment
from outrider_bench.experiment.traffic import Encoder, Request, requests_of
from outrider_bench.sample import Sample
from outrider_bench.synthetic_drafter import SyntheticFamily, SyntheticSettings

PROMPT = [7, 8, 9]
TEXT = [*PROMPT, *range(100, 1500)]
_NUMBERS = count(1)


def _opened(tokens: list[int], wanted: int) -> DraftSequence:
    return DraftSequence(
        Opened(
            next(_NUMBERS),
            list(tokens),
            SamplingParams(),
            DraftDistribution.ONE_HOT,
            Window(64, 64),
            wanted,
            prompt_length=len(PROMPT),
        )
    )


def _family(acceptance: list[float], seed: int = 0) -> SyntheticFamily:
    return SyntheticFamily(SyntheticSettings(acceptance=acceptance, seed=seed), [])


def _guesses(family: SyntheticFamily, tokens: list[int], wanted: int) -> list[int]:
    sequence = _opened(tokens, wanted)
    family.opened(sequence)
    asyncio.run(family.propose([sequence], lambda: False))
    return sequence.guesses


def _learn(family: SyntheticFamily) -> None:
    sequence = _opened(PROMPT, 4)
    family.opened(sequence)
    sequence.tokens += TEXT[len(PROMPT) :]
    family.closed(sequence)


def _accepted(family: SyntheticFamily, wanted: int) -> Iterator[int]:
    """How many guesses of each draft are right, while a text is written."""
    at = len(PROMPT)
    while at < len(TEXT) - wanted:
        found = _guesses(family, TEXT[:at], wanted)
        right = [a == b for a, b in zip(found, TEXT[at:], strict=False)]
        yield [*right, False].index(False)
        at += [*right, False].index(False) + 1


def test_a_prompt_that_is_new_gets_no_guess() -> None:
    family = _family([0.8])
    assert _guesses(family, PROMPT, 4) == []
    _learn(family)
    assert len(_guesses(family, PROMPT, 4)) == 4
    assert _guesses(family, [1, 2], 4) == []


def test_guesses_are_right_with_the_probability_of_their_position() -> None:
    family = _family([0.9, 0.5])
    _learn(family)
    found = list(_accepted(family, 2))
    first = sum(accepted >= 1 for accepted in found) / len(found)
    second = found.count(2) / sum(accepted >= 1 for accepted in found)
    # Four standard deviations of some 600 and 540 draws.
    assert first == pytest.approx(0.9, abs=0.05)
    assert second == pytest.approx(0.5, abs=0.09)


def test_errors_belong_to_text_and_seed() -> None:
    families = [_family([0.5], seed) for seed in (1, 1, 2)]
    for family in families:
        _learn(family)
    one, same, other = ([*_accepted(family, 1)] for family in families)
    assert one == same != other


def test_at_acceptance_0_every_guess_is_wrong_without_knowing_a_text() -> None:
    assert _guesses(_family([0.0]), PROMPT, 3) == [0, 0, 0]


async def test_a_load_is_learned_before_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    played: list[tuple[int, bool]] = []

    async def play(requests: Sequence[Request], *rest: Any) -> Played:
        asked = rest[2]
        played.append((len(requests), asked.speculation == LEARNING))
        return Played(Sample(0, 1.0))

    monkeypatch.setattr(measuring, "play", play)
    server: Any = SimpleNamespace(endpoint=None)
    bench = measuring.Bench(server, None, Encoder(Path("models/target")))
    settings = {"name": "x", "drafters": {"s": {"family": "synthetic"}, "n": {}}}
    for drafter in ("n", "s"):
        experiment = Experiment.model_validate({**settings, "use": [drafter]})
        await bench.warm_up(experiment, DRAFTED)
    # Four requests warm up, one of each kind.
    count = len(requests_of(experiment.workload, bench.encoder))
    assert played == [(4, False), (count, True), (4, True), (4, False)]


def test_a_prediction_draws_from_the_same_acceptance() -> None:
    experiment = Experiment.model_validate(
        {
            "name": "x",
            "target": {"threads": 1},
            "drafters": {
                "s": {"family": "synthetic", "settings": {"acceptance": "0.9,0.5", "token_ms": 2}}
            },
            "use": ["s"],
        }
    )
    scenario = scenario_of(experiment, DRAFTED, made_up_profile(), [], 0)
    [drafter] = scenario.drafters
    assert (drafter.drafts_by, drafter.acceptance) == ("acceptance", {"": [0.9, 0.5]})
    cost = scenario.costs.drafting["synthetic s"]
    assert (cost.round_s, cost.token_s) == (0.0, {1: 0.002})
