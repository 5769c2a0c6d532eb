"""The planner on what a published model wrote: chats, code, JSON, rewritten and summarised texts.

`bench/traffic/smollm2-texts.jsonl` has 27 greedy answers of SmolLM2-135M-Instruct. The production
n-gram family looks up their tokens. For "grammar" the file tells where a grammar forces the text.
"""

from collections import defaultdict
from pathlib import Path
from random import Random
from typing import Any

import pytest

from outrider_bench.simulator.recorded import RecordedRequest, read_recording
from outrider_bench.simulator.scenario import Scenario
from outrider_bench.simulator.simulation import Simulation

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
TEXTS = list(read_recording(ROOT / "bench/traffic/smollm2-texts.jsonl"))
NGRAM = {"name": "ngram", "drafts_by": "lookup", "cost": "ngram", "round_trip_ms": 1.2}
GRAMMAR = {"name": "grammar", "cost": "grammar", "round_trip_ms": 1.2, "requires_grammar": True}
# Seconds of a forward of one row, and its factor for more rows.
ROWS = {
    "avx2": (0.011, {1: 1.0, 2: 1.06, 3: 1.23, 4: 1.57, 5: 2.08, 6: 2.22, 8: 2.61, 9: 3.3}),
    "avx512": (0.011, {1: 1.0, 2: 1.03, 3: 1.08, 5: 1.25, 9: 1.5}),
    "gpu": (0.005, {1: 1.0, 2: 1.005, 5: 1.01, 9: 1.02}),
}


def seconds_of(
    texts: list[RecordedRequest], place: str, *drafters: dict[str, Any], always: bool = False
) -> list[float]:
    """Seconds from the first to the last token of each text, one text after the other."""
    one, factors = ROWS[place]
    costs = {
        "source": "a CPU's and a GPU's factors by rows",
        "measured": False,
        "forwards": [
            {"sequences": 1, "tokens": rows, "seconds": one * factor}
            for rows, factor in factors.items()
        ],
        "prompt_step_s": 0.0005,
        "prompt_token_s": 0.05 * one,
        "host_step_s": 0.0004,
        "host_sequence_s": 0.00001,
        "drafting": {
            "ngram": {"round_s": 0.0002, "token_s": {1: 0.0}, "message_s": 0.00015},
            "grammar": {"round_s": 0.0005, "token_s": {1: 0.00002}, "message_s": 0.00015},
        },
    }
    given: dict[str, Any] = {
        "costs": costs,
        "seconds": 600.0,
        "sequences": [1],
        "recording": texts,
        "drafters": [{**each, "on_target_device": place != "gpu"} for each in drafters],
        "always_draft": always,
    }
    simulation = Simulation(Scenario.model_validate(given), 1, drafting=bool(drafters))
    simulation.run()
    times = [request.received_at for request in simulation.traffic.requests]
    return [each[-1][0] - each[0][0] for each in times]


@pytest.mark.parametrize(
    ("place", "drafters"),
    [(place, [NGRAM]) for place in ROWS] + [("avx512", [NGRAM, GRAMMAR])],
)
def test_the_planners_choice_is_as_good_as_the_better_of_always_and_never(
    place: str, drafters: list[dict[str, Any]]
) -> None:
    never = seconds_of(TEXTS, place)
    always = [seconds_of([text], place, *drafters, always=True)[0] for text in TEXTS]
    # Texts of all kinds take turns, so each begins with what the drafter did for others.
    order = [*range(len(TEXTS))] * 2
    Random(0).shuffle(order)
    chosen = seconds_of([TEXTS[i] for i in order], place, *drafters)
    best: dict[str, float] = defaultdict(float)
    taken: dict[str, float] = defaultdict(float)
    for i, seconds in zip(order, chosen, strict=True):
        best[TEXTS[i].kind] += min(never[i], always[i])
        taken[TEXTS[i].kind] += seconds
    found = {kind: round(best[kind] / taken[kind], 3) for kind in best}
    assert sum(best.values()) >= sum(taken.values()), found
    # An answer of 60 tokens that is nearly all guessed takes 20 steps, so each step counts.
    assert min(found.values()) >= 0.9, found


def test_a_drafter_of_grammars_costs_texts_without_a_grammar_nothing() -> None:
    # On the target's cores each message to it would take time.
    free = [text for text in TEXTS if not text.grammar]
    alone = seconds_of(free, "avx512", NGRAM)
    assert seconds_of(free, "avx512", NGRAM, GRAMMAR) == pytest.approx(alone, rel=1e-9)
