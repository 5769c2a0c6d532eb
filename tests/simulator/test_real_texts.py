"""The planner on a published model's texts: chats, code, JSON, rewritten and summarised texts.

`bench/traffic/smollm2-texts.jsonl` has 27 greedy answers of SmolLM2-135M-Instruct, and
`smollm2-table-texts.jsonl` nine for each kind of `table-prompts.jsonl`. The production n-gram
family looks up their tokens. For the drafter "grammar", the first file tells where a grammar forces
the text.
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
TABLE_TEXTS = list(read_recording(ROOT / "bench/traffic/smollm2-table-texts.jsonl"))
NGRAM = {"name": "ngram", "drafts_by": "lookup", "cost": "ngram", "round_trip_ms": 1.2}
GRAMMAR = {"name": "grammar", "cost": "grammar", "round_trip_ms": 1.2, "requires_grammar": True}
# For each place: the seconds of a forward of one row, and the factor for each number of rows.
ROWS = {
    "avx2": (0.011, {1: 1.0, 2: 1.06, 3: 1.23, 4: 1.57, 5: 2.08, 6: 2.22, 8: 2.61, 9: 3.3}),
    "avx512": (0.011, {1: 1.0, 2: 1.03, 3: 1.08, 5: 1.25, 9: 1.5}),
    "gpu": (0.005, {1: 1.0, 2: 1.005, 5: 1.01, 9: 1.02}),
}
# Maps a number of rows to milliseconds of SmolLM2's forward, on one core of an EPYC with
# AVX512-BF16. The C decoder computes eight rows at once: beside eight sequences the first draft
# tokens cost the most.
BLOCKS_ROWS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 20, 24, 40, 72]
BLOCKS_MS = [10.7, 13.8, 14.2, 14.0, 13.2, 12.0, 12.7, 13.4]
BLOCKS_MS += [15.8, 18.2, 18.4, 20.9, 23.8, 31.8, 37.0, 57.0, 100.0]
FURTHER_SEQUENCE_MS = 0.15
# The number of measured texts of a kind; one more text warms up.
MEASURED = 8
# The seconds between the starts of batches. A batch ends long before the next starts.
APART_S = 20.0


def seconds_of(
    texts: list[RecordedRequest], place: str, *drafters: dict[str, Any], always: bool = False
) -> list[float]:
    """Return the seconds from first to last token of each text, one text after the other."""
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
    # Texts of all kinds take turns, so each begins with measurements from other kinds.
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
    # The drafter is on the target's cores, where each message to it would take time.
    free = [text for text in TEXTS if not text.grammar]
    alone = seconds_of(free, "avx512", NGRAM)
    assert seconds_of(free, "avx512", NGRAM, GRAMMAR) == pytest.approx(alone, rel=1e-9)


def seconds_by_kind(
    batch: int, *drafters: dict[str, Any], always: bool = False
) -> dict[str, float]:
    """Return the seconds from the first request of a batch to its last token, summed for each kind.

    Batches have `batch` texts of one kind, and follow each other as in `outrider lab table`.
    """
    by_kind: dict[str, list[RecordedRequest]] = defaultdict(list)
    for text in TABLE_TEXTS:
        by_kind[text.kind].append(text)
    batches = [[texts[MEASURED] for texts in by_kind.values()]]
    for first in range(0, MEASURED, batch):
        batches += [texts[first : first + batch] for texts in by_kind.values()]
    recording = [
        text.model_copy(update={"time": APART_S * place})
        for place, texts in enumerate(batches)
        for text in texts[:batch]
    ]
    given = {
        "costs": costs_in_blocks(),
        "seconds": APART_S * len(batches),
        "sequences": [batch],
        "max_sequences": MEASURED,
        "arrivals": "recorded",
        "recording": recording,
        "drafters": [{**each, "on_target_device": True} for each in drafters],
        "always_draft": always,
    }
    simulation = Simulation(Scenario.model_validate(given), batch, drafting=bool(drafters))
    simulation.run()
    ends: dict[float, float] = defaultdict(float)
    for request in simulation.traffic.requests:
        ends[request.sent_at] = max(ends[request.sent_at], request.received_at[-1][0])
    seconds: dict[str, float] = defaultdict(float)
    for place, texts in enumerate(batches[1:], 1):
        seconds[texts[0].kind] += ends[APART_S * place] - APART_S * place
    return seconds


def costs_in_blocks() -> dict[str, Any]:
    """Return SmolLM2's costs on a CPU whose cores the drafters share."""
    return {
        "source": "one core of an EPYC with AVX512-BF16, and assumed costs of the host",
        "measured": False,
        "forwards": [
            {
                "sequences": count,
                "tokens": rows / count,
                "seconds": (milliseconds + FURTHER_SEQUENCE_MS * (count - 1)) / 1000,
            }
            for count in range(1, MEASURED + 1)
            for rows, milliseconds in zip(BLOCKS_ROWS, BLOCKS_MS, strict=True)
            if rows >= count
        ],
        "prompt_step_s": 0.0005,
        "prompt_token_s": 0.00075,
        "host_step_s": 0.0015,
        "host_sequence_s": 0.0001,
        "drafting": {
            "ngram": {
                "round_s": 0.0002,
                "token_s": {1: 0.0},
                "sequence_s": 0.00001,
                "message_s": 0.00015,
            }
        },
    }


@pytest.mark.parametrize("batch", [1, 4, 8])
def test_batches_of_each_kind_end_about_as_early_as_by_the_better_of_always_and_never(
    batch: int,
) -> None:
    never = seconds_by_kind(batch)
    always = seconds_by_kind(batch, NGRAM, always=True)
    chosen = seconds_by_kind(batch, NGRAM)
    found = {kind: round(min(never[kind], always[kind]) / chosen[kind], 3) for kind in never}
    assert min(found.values()) >= 0.95, found
    # Where drafts do not pay, the choice is to decode plainly.
    assert sum(never.values()) >= 0.98 * sum(chosen.values()), found
