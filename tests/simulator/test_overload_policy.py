"""Overload in virtual time: goodput, speculation and fairness at several times the capacity.

Clients wait 8 s for an answer, and the verifier runs 32 sequences.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest

from outrider_bench.simulator.costs import Costs
from outrider_bench.simulator.scenario import Scenario
from outrider_bench.simulator.simulation import Simulation
from outrider_bench.simulator.traffic import Request

pytestmark = pytest.mark.slow

COMMON: dict[str, Any] = {
    "costs": "assumed-gpu",
    "seconds": 40.0,
    "max_sequences": 32,
    "prompt_tokens": [32, 96],
    "output_tokens": [64, 192],
    "timeout_seconds": 8.0,
    "drafters": [{"name": "d", "acceptance": 0.8}],
}
# At this time the first requests have ended, and the queue has its full length.
WARM_UP_S = 15.0
PLAIN = 0.0
"""The acceptance that stands for no drafter."""


def in_time(request: Request) -> bool:
    """Return whether the whole answer came before its client gave up."""
    return len(request.received) == request.text.output_length


def seconds(request: Request) -> float:
    return request.received_at[-1][0] - request.sent_at


@cache
def run(rate: float, acceptance: float = 0.8, batch: int = 32) -> tuple[float, float]:
    """Return the timely answers per second, and the verified draft tokens per generated token."""
    drafters = [{"name": "d", "acceptance": acceptance}]
    given = {**COMMON, "drafters": drafters, "max_sequences": batch}
    scenario = Scenario.model_validate({**given, "arrivals": "poisson", "rate": rate})
    simulation = Simulation(scenario, 1, drafting=acceptance > 0.0)
    outcome = simulation.run()
    ends = [each.received_at[-1][0] for each in simulation.traffic.requests if in_time(each)]
    goodput = sum(end > WARM_UP_S for end in ends) / (scenario.seconds - WARM_UP_S)
    verified = outcome.sample.counters.get("spec_decode_num_draft_tokens", 0.0)
    return goodput, verified / outcome.sample.tokens


def tenants(path: Path, rates: dict[str, float]) -> dict[str, list[Request]]:
    """Return requests after the warm-up, keyed by tenant; each tenant has its own rate."""
    draw = Random(0)
    lines: list[dict[str, Any]] = []
    for tenant, rate in rates.items():
        at = draw.expovariate(rate)
        while at < COMMON["seconds"]:
            lengths = {
                "prompt_tokens": draw.randint(32, 96),
                "output_tokens": draw.randint(64, 192),
            }
            lines.append({"time": at, "tenant": tenant, **lengths})
            at += draw.expovariate(rate)
    path.write_text("\n".join(map(json.dumps, sorted(lines, key=lambda line: line["time"]))))
    scenario = Scenario.model_validate({**COMMON, "arrivals": "recorded", "recording": path})
    simulation = Simulation(scenario, 1)
    simulation.run()
    found: dict[str, list[Request]] = {tenant: [] for tenant in rates}
    for request in simulation.traffic.requests:
        if WARM_UP_S < request.sent_at < scenario.seconds - COMMON["timeout_seconds"]:
            found[request.text.tenant].append(request)
    return found


@pytest.mark.parametrize("acceptance", [PLAIN, 0.8])
def test_goodput_at_threefold_load_is_near_its_peak(acceptance: float) -> None:
    rates = (20.0, 30.0, 40.0)
    peak = max(run(rate, acceptance)[0] for rate in rates)
    assert peak < 0.95 * max(rates), "all of these loads fit"
    assert run(3 * peak, acceptance)[0] >= 0.9 * peak


def test_a_verifier_that_slows_down_loses_its_speed_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other processes slow the verifier down, but answers to requests that waited come in time."""
    slow_from, slower = 25.0, 1.5
    scenario = Scenario.model_validate({**COMMON, "arrivals": "poisson", "rate": 60.0})
    simulation = Simulation(scenario, 1, drafting=False)

    def slow_down() -> None:
        forward_s = Costs.forward_s
        monkeypatch.setattr(Costs, "forward_s", lambda *given: slower * forward_s(*given))

    simulation.events.at(slow_from, slow_down)
    outcome = simulation.run()
    ends = [each.received_at[-1][0] for each in simulation.traffic.requests if in_time(each)]
    before = sum(WARM_UP_S < end < slow_from for end in ends) / (slow_from - WARM_UP_S)
    after = sum(end > slow_from for end in ends) / (scenario.seconds - slow_from)
    assert after >= 0.9 * before / slower
    assert outcome.late_count == 0


@pytest.mark.parametrize(("batch", "rate"), [(32, 60.0), (128, 170.0)])
def test_speculation_is_shed_with_load_and_is_no_loss(batch: int, rate: float) -> None:
    """Under load the batch is large and its rows are expensive, so fewer tokens are drafted."""
    _, calm = run(rate / 30, 0.5, batch)
    plain, _ = run(rate, PLAIN, batch)
    drafted, verified = run(rate, 0.5, batch)
    assert verified < 0.75 * calm
    assert drafted >= plain


def test_a_flood_leaves_another_tenants_slowest_answers(tmp_path: Path) -> None:
    """The comparison is with a verifier that is busy, but has no queue."""
    busy = tenants(tmp_path / "busy", {"a": 14.0, "b": 4.0})
    flooded = tenants(tmp_path / "flooded", {"a": 60.0, "b": 4.0})
    refused = [request for request in flooded["a"] if request.error is not None]
    assert len(refused) > 0.4 * len(flooded["a"])
    assert all(map(in_time, flooded["b"]))
    before, during = (
        sorted(map(seconds, requests["b"]))[int(0.99 * len(requests["b"]))]
        for requests in (busy, flooded)
    )
    assert during <= 1.5 * before
