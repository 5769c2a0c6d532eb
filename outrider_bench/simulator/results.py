"""A simulation's results: tables and JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from outrider_bench.console import console_for_output, progress, table_of
from outrider_bench.experiment.report.figures import Figures, groups_of, sample_figures
from outrider_bench.experiment.report.tables import (
    ACCEPTANCE,
    LATENCIES,
    NEXT_DRAFTS,
    PHASE_TIMES,
)
from outrider_bench.simulator.scenario import Scenario
from outrider_bench.simulator.simulation import Outcome, simulate

PLAIN = "plain"
DRAFTED = "drafted"
Outcomes = dict[tuple[int, str], Outcome]
"""Maps a number of requests in progress and a decoding mode to the results."""
_SPEED = {"tokens_per_s": "tokens/s", "times_plain": "× plain", **LATENCIES}
_STEPS = {
    **PHASE_TIMES,
    "tokens_per_forward": "tokens / step",
    "of_limit": "of limit",
    **NEXT_DRAFTS,
    "wasted_per_token": "wasted / token",
    "draft_bytes_per_token": "bytes / token",
}
_STEPS_NOTE = (
    "the verifier's steps: milliseconds by phase; tokens that a step commits per sequence; of "
    "limit: time of forwards alone over time of steps; shares of commits by the next draft's state"
)
_ACCEPTANCE_NOTE = "acceptance, and the share of drafts whose token at a position was accepted,"


def outcomes(scenario: Scenario) -> Outcomes:
    """Run all simulations of a scenario."""
    ways = [PLAIN] if scenario.baseline or not scenario.drafters else []
    ways += [DRAFTED] if scenario.drafters else []
    asked = [(load, way) for load in scenario.loads for way in ways]
    with progress() as bar:
        return {
            (load, way): simulate(scenario, load, drafting=way == DRAFTED)
            for load, way in bar.track(asked, description="simulating")
        }


def record(scenario: Scenario, found: Outcomes) -> dict[str, Any]:
    """Return the JSON record: the scenario, and the figures of each outcome."""
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
    written = record(scenario, found)
    console = console_for_output()
    console.print(written["machine"], markup=False)
    for table in _tables(scenario.name, found):
        console.print(table)
    for outcome in found.values():
        if outcome.errors:
            count = len(outcome.errors)
            message = f"{count} requests failed, the first one: {outcome.errors[0]}"
            console.print(message, markup=False)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        path = out / f"{scenario.name}.json"
        path.write_text(json.dumps(written, indent=1))
        print(f"written: {path}")


def _tables(name: str, found: Outcomes) -> Iterator[Table]:
    """Yield tables of rates and latencies, of the verifier's steps, and of acceptance."""
    figures = {key: sample_figures(outcome.sample) for key, outcome in found.items()}
    for (load, way), own in figures.items():
        plain = figures.get((load, PLAIN))
        if way == DRAFTED and plain is not None:
            own["times_plain"] = own["tokens_per_s"] / plain["tokens_per_s"]
    yield _table(f"{name}\nTPOT is per token, not per chunk", figures, _SPEED)
    yield _table(f"{name}\n{_STEPS_NOTE}", figures, _STEPS)
    for group in ("", *groups_of(each for own in figures.values() for each in own)):
        of = f"of {group.replace('_', ' ', 1)}" if group else "of all"
        names = {f"{group}_{name}".lstrip("_"): words for name, words in ACCEPTANCE.items()}
        yield _table(f"{name}\n{_ACCEPTANCE_NOTE} {of}", figures, names)


def _table(
    title: str, figures: Mapping[tuple[int, str], Figures], columns: Mapping[str, str]
) -> Table:
    table = table_of(title, ("way", "batch", *columns.values()))
    for (load, way), own in figures.items():
        shown = [f"{own[name]:.2f}" if name in own else "–" for name in columns]
        if any(name in own for name in columns):
            table.add_row(way, str(load), *shown)
    return table
