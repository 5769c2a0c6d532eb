"""Scenarios that speculation is judged by, and what they bring beside plain decoding."""

from __future__ import annotations

from functools import cache
from typing import Any

from bench.simulator.scenario import Scenario
from bench.simulator.simulation import simulate

BATCHES = (1, 8, 32, 128)


@cache
def _plain(batch: int, seconds: float, waves: int | None) -> float:
    scenario = Scenario(costs="assumed-gpu", seconds=seconds, sequences=[batch], waves=waves)
    return simulate(scenario, batch, drafting=False).sample.tokens_per_s


def speed(drafters: list[dict[str, Any]], batch: int, seconds: float = 10.0, waves: int | None = None, **more: Any) -> float:
    """tokens/s with these drafters over those of plain decoding, in virtual time."""
    given = {"costs": "assumed-gpu", "seconds": seconds, "sequences": [batch], "waves": waves, "drafters": drafters, **more}
    drafted = simulate(Scenario.model_validate(given), batch).sample.tokens_per_s
    return drafted / _plain(batch, seconds, waves)
