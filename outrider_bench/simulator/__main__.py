"""`outrider simulate`: runs a scenario in virtual time and prints its results."""

from __future__ import annotations

import sys

from outrider.process.config import command
from outrider.process.usage import invoke, refuse
from outrider_bench.simulator.results import show
from outrider_bench.simulator.scenario import Scenario
from outrider_bench.simulator.worlds.campaign import show_campaign


def main(arguments: list[str]) -> int:
    """Run the command and return its exit status."""
    name = "outrider simulate"
    status: int = invoke(command(Scenario, name, _run), name, arguments)
    return status


def _run(scenario: Scenario) -> int:
    if scenario.faults is not None:
        return show_campaign(scenario.seed, scenario.faults)
    try:
        show(scenario)
    except ValueError as error:
        refuse("outrider simulate", str(error))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
