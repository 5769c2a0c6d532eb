"""A simulation's results in the form of `outrider lab bench`: tables and JSON."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from outrider_bench.console import console_for_output, progress
from outrider_bench.report import Results, tables, write
from outrider_bench.simulator.scenario import Scenario
from outrider_bench.simulator.simulation import Outcome, simulate

PLAIN = "simulated, plain"
DRAFTED = "simulated, drafted"


def outcomes(scenario: Scenario) -> dict[tuple[int, str], Outcome]:
    """Run all simulations of a scenario; the outcomes by requests under way and way of decoding."""
    ways = [PLAIN] if scenario.baseline or not scenario.drafters else []
    ways += [DRAFTED] if scenario.drafters else []
    asked = [(load, way) for load in scenario.loads for way in ways]
    with progress() as bar:
        return {
            (load, way): simulate(scenario, load, drafting=way == DRAFTED)
            for load, way in bar.track(asked, description="simulating")
        }


def record(scenario: Scenario, found: dict[tuple[int, str], Outcome]) -> dict[str, Any]:
    """The JSON record: the scenario, and the figures of each outcome."""
    return {
        "machine": f"simulated; costs: {scenario.costs.source}",
        "scenario": scenario.model_dump(mode="json", exclude={"recording"}),
        "simulated": [
            {"batch": load, "way": way, **asdict(outcome)} for (load, way), outcome in found.items()
        ],
    }


def show(scenario: Scenario, out: Path | None) -> None:
    """Simulate, print tables, and write the files to the directory `out`, if there is one."""
    found = outcomes(scenario)
    results = _results(scenario, found)
    written = record(scenario, found)
    console = console_for_output()
    console.print(written["machine"], markup=False)
    for table in tables(results, PLAIN):
        console.print(table)
    for outcome in found.values():
        if outcome.errors:
            count = len(outcome.errors)
            message = f"{count} requests failed, the first one: {outcome.errors[0]}"
            console.print(message, markup=False)
    if out is not None:
        print(f"written: {write(out, scenario.name, written)}")


def _results(scenario: Scenario, found: dict[tuple[int, str], Outcome]) -> Results:
    results = Results(scenario.name)
    for (load, way), outcome in found.items():
        results.add(load, way, outcome.sample)
    return results
