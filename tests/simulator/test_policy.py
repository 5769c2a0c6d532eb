"""The bounds of speculation, by simulation: its greatest cost and its least gain.

The results are exact, because the scenarios have no noise.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from outrider_bench.simulator.scenario import Scenario
from outrider_bench.simulator.simulation import Simulation
from tests.simulator.policies import BATCHES, speed

pytestmark = pytest.mark.slow

WRONG = {"name": "wrong", "acceptance": 0.0}
GOOD = {"name": "good", "acceptance": 0.8}


@pytest.mark.parametrize("batch", BATCHES)
def test_a_drafter_that_is_always_wrong_costs_next_to_nothing(batch: int) -> None:
    assert speed([WRONG], batch) >= 0.985


@pytest.mark.parametrize("batch", BATCHES)
def test_a_good_drafter_is_never_a_loss(batch: int) -> None:
    assert speed([GOOD], batch) >= 1.0


@pytest.mark.parametrize("batch", BATCHES)
def test_a_good_drafter_is_no_loss_with_two_waves_of_one_length(batch: int) -> None:
    assert speed([GOOD], batch, seconds=60.0, waves=2) >= 1.0


@pytest.mark.parametrize("batch", [1, 8, 32])
@pytest.mark.parametrize(
    ("before", "event"),
    [
        (0.8, {"what": "accept", "acceptance": 0.0}),
        (0.0, {"what": "accept", "acceptance": 0.8}),
        (0.8, {"what": "hang", "seconds": 4.0}),
    ],
    ids=["turns bad", "turns good", "hangs"],
)
def test_a_drafter_that_changes_costs_next_to_nothing(
    before: float, event: dict[str, Any], batch: int
) -> None:
    schedule = [{"at": 4.0, "who": "d", **event}]
    assert speed([{"name": "d", "acceptance": before}], batch, schedule=schedule) >= 0.985


@pytest.mark.parametrize(
    ("round_trip_ms", "batch"), [(20, 1), (20, 32), (50, 8), (100, 1), (100, 32), (200, 8)]
)
def test_a_drafter_that_is_far_away_costs_next_to_nothing(round_trip_ms: float, batch: int) -> None:
    assert speed([{**GOOD, "round_trip_ms": round_trip_ms}], batch) >= 0.985


@pytest.mark.parametrize("batch", [1, 8, 32])
def test_the_better_of_two_drafters_is_chosen(batch: int) -> None:
    other = {"name": "other", "acceptance": 0.5}
    alone = max(speed([GOOD], batch), speed([other], batch))
    assert speed([GOOD, other], batch) >= 0.98 * alone


@pytest.mark.parametrize("batch", [1, 8, 32])
def test_a_drafter_that_mostly_has_no_draft_is_never_a_loss(batch: int) -> None:
    """The drafter is like n-gram lookups over a network: nine in ten lookups find nothing."""
    lookups = {
        "name": "d",
        "acceptance": [0.9, 0.85, 0.8],
        "skips_hard": True,
        "cost": "ngram",
        "round_trip_ms": 5,
    }
    assert speed([lookups], batch, hard_share=0.9) >= 1.0


def test_a_drafter_that_lost_in_a_crowd_is_tried_again_for_one_client(tmp_path: Path) -> None:
    """The drafter slows the target and is mostly wrong.

    After the crowd has left, its guesses get better.
    """
    last = 20.0
    crowd = [2.6 * (i // 32) for i in range(96)]
    one = [last + 1.6 * i for i in range(16)]
    recording = tmp_path / "crowd.jsonl"
    with recording.open("w") as file:
        for time in crowd + one:
            print(json.dumps({"time": time, "prompt_tokens": 64, "output_tokens": 128}), file=file)
    given = {
        "costs": "assumed-gpu",
        "seconds": 60.0,
        "arrivals": "recorded",
        "recording": recording,
        "drafters": [{"name": "d", "acceptance": 0.45, "interference": 1.0}],
        "schedule": [{"at": last - 1, "who": "d", "what": "accept", "acceptance": 0.85}],
    }
    times = []
    for drafting in (False, True):
        simulation = Simulation(Scenario.model_validate(given), 32, drafting=drafting)
        simulation.run()
        requests = simulation.traffic.requests[-4:]
        times.append(sum(each.received_at[-1][0] - each.sent_at for each in requests))
    plain_s, drafted_s = times
    assert plain_s / drafted_s >= 1.5
