"""Nine small tenants beside a tenant that asks for too much, in virtual time."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from outrider_bench.simulator.scenario import Scenario
from outrider_bench.simulator.simulation import Simulation

TRAFFIC = Path(__file__).parents[2] / "bench/traffic"
# The last small request comes at 19.3 s.
SECONDS = 21.0


@cache
def small_requests(name: str) -> tuple[float, float]:
    """Return two times of the small requests, in seconds.

    The first is the p99 of the times to the end of an answer, the second the largest time to a
    first token.
    """
    given = {"arrivals": "recorded", "recording": TRAFFIC / f"{name}.jsonl", "seconds": SECONDS}
    simulation = Simulation(Scenario.model_validate(given | {"max_sequences": 64}), 1)
    simulation.run()
    small = [each for each in simulation.traffic.requests if each.text.kind == "small"]
    assert all(len(each.received) == each.text.output_length for each in small)
    whole = sorted(each.received_at[-1][0] - each.sent_at for each in small)
    first = max(each.received_at[0][0] - each.sent_at for each in small)
    return whole[round(0.99 * (len(whole) - 1))], first


@pytest.mark.parametrize(
    "flood",
    [
        "burst",
        "prompts",
        pytest.param("unread", marks=pytest.mark.slow),
        pytest.param("choices", marks=pytest.mark.slow),
    ],
)
def test_a_flood_of_one_tenant_slows_small_ones_by_less_than_half(flood: str) -> None:
    """The flood is 200 requests, 40 long prompts, 100 long answers left unread, or 64 choices.

    Each choice has 1,900 tokens.
    """
    alone, _ = small_requests("alone")
    beside, first = small_requests(flood)
    assert beside <= 1.5 * alone
    assert first <= 0.25
