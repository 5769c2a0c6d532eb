"""Several drafters of one sequence gain at least as much as the best of them gains alone.

Texts and guesses are drawn from a seed, and time is virtual, so that the figures are exact.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest

from outrider_bench.simulator.scenario import DrafterSpec, Scenario
from outrider_bench.simulator.simulation import Outcome, simulate

TRAFFIC = Path(__file__).parents[2] / "bench/traffic"
OUTPUT = 160
# The number of texts for each batch size. At each new size of the batch the engine first measures
# plain steps. With eight texts, a batch of eight would only shrink, and so tell more about plain
# steps than about drafters.
TEXTS = {1: 8, 8: 24}
# The quick drafters answer in 0.6 ms. The model's draft takes 2 ms and the head's 3 ms, while a
# step takes 10 ms. The model runs ahead. The head does not run ahead, so its round trip is longer.
DRAFTERS = {
    "ngram": DrafterSpec(name="ngram", cost="ngram"),
    "short": DrafterSpec(name="short", cost="ngram"),
    "model": DrafterSpec(name="model", slowness=0.1),
    "head": DrafterSpec(name="head", slowness=0.1, round_trip_ms=2.0),
    "eagle3": DrafterSpec(name="eagle3", slowness=0.1, round_trip_ms=2.0),
}
SETS = ["ngram model", "ngram head", "short model", "short head", "ngram short model"]


def _right(draw: Random, share: float, length: int) -> str:
    return "".join(["+" if draw.random() < share else "-" for _ in range(length)])


def _copied(draw: Random, length: int) -> str:
    """Return guesses only in repeated stretches, which are three tenths of the text."""
    found = ""
    copies = False
    while len(found) < length:
        count = 1 + int(draw.expovariate(1 / (20 if copies else 47)))
        found += _right(draw, 0.9, count) if copies else "." * count
        copies = not copies
    return found[:length]


def _sure(draw: Random, length: int) -> str:
    """Return one or two guesses, nearly all of them right, before each place without a guess."""
    return "".join(draw.choices(["++.", "+.", "-."], [65, 32, 3], k=length))[:length]


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Return the texts for each size of a batch."""
    folder = tmp_path_factory.mktemp("combinations")
    return {batch: _record(folder / f"{batch}.jsonl", count) for batch, count in TEXTS.items()}


def _record(path: Path, count: int) -> Path:
    draw = Random(3)
    length = OUTPUT + 40
    lines = [
        json.dumps(
            {
                "prompt_tokens": 64,
                "output_tokens": OUTPUT,
                "guesses": {
                    "model": _right(draw, 0.8, length),
                    "head": _right(draw, 0.75, length),
                    "ngram": _copied(draw, length),
                    "short": _sure(draw, length),
                },
            }
        )
        for _ in range(count)
    ]
    path.write_text("\n".join(lines))
    return path


@cache
def outcome(recording: Path, names: str, batch: int, always: bool) -> Outcome:
    """Return the outcome of the texts with these drafters."""
    scenario = Scenario(
        costs="assumed-gpu",
        seconds=600.0,
        sequences=[batch],
        recording=recording,
        drafters=[DRAFTERS[name] for name in names.split()],
        always_draft=always,
    )
    return simulate(scenario, batch)


def tokens_per_forward(found: Outcome) -> float:
    counters = found.sample.counters
    return counters["generation_tokens"] / counters["step_seconds_count"]


def tokens_per_s(found: Outcome) -> float:
    return found.sample.tokens_per_s


def cases() -> Iterator[Any]:
    """Yield each set of drafters at each batch size, under both policies."""
    for always, batch, names in product([False, True], [1, 8], SETS):
        marks = [pytest.mark.slow] if batch > 1 else []
        name = f"{'always' if always else 'as it pays'}-{batch}-{names}"
        yield pytest.param(names, batch, always, marks=marks, id=name)


@pytest.mark.parametrize(("names", "batch", "always"), list(cases()))
def test_together_they_are_as_good_as_the_best_alone(
    recordings: dict[int, Path], names: str, batch: int, always: bool
) -> None:
    recording = recordings[batch]
    alone = [outcome(recording, name, batch, always) for name in names.split()]
    together = outcome(recording, names, batch, always)
    for figure in (tokens_per_forward, tokens_per_s):
        assert figure(together) >= 0.98 * max(map(figure, alone))


@pytest.mark.parametrize("always", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_on_real_texts_ngrams_add_a_fifth_to_an_eagle3_head(always: bool) -> None:
    """The texts are the demo's greedy texts, with guesses of the bundled head and of n-grams."""
    alone, together = (
        outcome(TRAFFIC / "guesses-greedy.jsonl", names, 1, always)
        for names in ("eagle3", "ngram eagle3")
    )
    for figure in (tokens_per_forward, tokens_per_s):
        assert figure(together) >= 1.2 * figure(alone)


def test_copied_stretches_add_a_tenth_to_a_head(recordings: dict[int, Path]) -> None:
    """The head guesses copied stretches no better than other text."""
    alone = tokens_per_forward(outcome(recordings[1], "head", 1, True))
    assert tokens_per_forward(outcome(recordings[1], "ngram head", 1, True)) >= 1.1 * alone
