"""The bounds of speculation, by simulation: its greatest cost and its least gain.

The results are exact, because the scenarios have no noise.
"""

from typing import Any

import pytest

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


@pytest.mark.parametrize("batch", [1, 8, 32])
@pytest.mark.parametrize("round_trip_ms", [20, 50, 100, 200])
def test_a_drafter_that_is_far_away_costs_next_to_nothing(round_trip_ms: float, batch: int) -> None:
    assert speed([{**GOOD, "round_trip_ms": round_trip_ms}], batch) >= 0.985


@pytest.mark.parametrize("batch", [1, 8, 32])
def test_the_better_of_two_drafters_is_chosen(batch: int) -> None:
    other = {"name": "other", "acceptance": 0.5}
    alone = max(speed([GOOD], batch), speed([other], batch))
    assert speed([GOOD, other], batch) >= 0.98 * alone


@pytest.mark.parametrize("batch", [1, 8, 32])
def test_a_drafter_that_mostly_has_no_draft_is_never_a_loss(batch: int) -> None:
    """It is like n-gram lookups over a network, nine tenths of which find nothing."""
    lookups = {
        "name": "d",
        "acceptance": [0.9, 0.85, 0.8],
        "skips_hard": True,
        "cost": "ngram",
        "round_trip_ms": 5,
    }
    assert speed([lookups], batch, hard_share=0.9) >= 1.0
