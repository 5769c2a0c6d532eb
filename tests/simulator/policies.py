"""Scenarios that judge the speculation policy by its speed relative to plain decoding."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from outrider_bench.simulator.scenario import Scenario
from outrider_bench.simulator.simulation import simulate

BATCHES = (1, 8, 32, 128)


@cache
def _plain(given: str) -> float:
    """Return tokens/s without drafters; `given` are the scenario's settings as JSON."""
    scenario = Scenario.model_validate_json(given)
    return simulate(scenario, scenario.sequences[0], drafting=False).sample.tokens_per_s


def speed(
    drafters: list[dict[str, Any]],
    batch: int,
    seconds: float = 10.0,
    schedule: list[dict[str, Any]] | None = None,
    **more: Any,
) -> float:
    """Return tokens/s with these drafters divided by tokens/s of plain decoding, in virtual time.

    `more` are settings of the scenario; both simulations have them.
    """
    given = {"costs": "assumed-gpu", "seconds": seconds, "sequences": [batch], **more}
    scenario = Scenario.model_validate({**given, "drafters": drafters, "schedule": schedule or []})
    drafted = simulate(scenario, batch).sample.tokens_per_s
    return drafted / _plain(json.dumps(given))
