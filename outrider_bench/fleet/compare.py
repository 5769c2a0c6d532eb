"""The fleet's figures beside those of the engine-level simulator, where both can run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from outrider_bench.fleet.layout import peak_rates
from outrider_bench.fleet.rates import cells
from outrider_bench.fleet.servers import Servers
from outrider_bench.fleet.simulation import Simulation
from outrider_bench.fleet.spec import Fleet
from outrider_bench.simulator.scenario import Scenario

_WARM_UP_S = 10.0
# The coarse simulator costs little, so its window is long enough to leave no noise of its own.
_COARSE_WINDOW_S = 400.0
# The fine one has at least this window, and a longer one at small loads: few requests are noisy.
_FINE_WINDOW_S = 40.0
_FINE_SEQUENCE_S = 800.0
# Requests that come so late may not end in time.
_TAIL_S = 15.0
FIGURES = ("tokens_per_s", "tpot_mean_ms", "tpot_p50_ms", "tpot_p99_ms", "ttft_p50_ms")


@dataclass(frozen=True, slots=True)
class Case:
    """A small fleet of one region that both simulators can run."""

    acceptance: float
    round_trip_ms: float
    verifiers: int
    load: int
    """Requests under way at each verifier, or with Poisson arrivals about so many on average."""
    drafters: int = 1
    """Of each verifier, all of one family."""
    arrivals: str = "closed"
    costs: str = "assumed-gpu"

    def fleet(self, max_sequences: int = 64) -> Fleet:
        """The case as a fleet whose links stay good and whose drafters stay up."""
        region = {"verifiers": self.verifiers, "peak_sequences": self.verifiers * self.load}
        return Fleet.model_validate(
            {
                "name": "compared",
                "costs": self.costs,
                "regions": {"here": region},
                "traffic": {
                    "arrivals": self.arrivals,
                    "prompt_tokens": [32, 96],
                    "output_tokens": [64, 192],
                    "night_share": 1.0,
                },
                "verifiers": {"max_sequences": max_sequences},
                "drafters": {
                    "count": self.drafters,
                    "acceptance": self.acceptance,
                    "max_sequences": max_sequences,
                    "mean_up_s": 1e12,
                    "mean_down_s": 0,
                },
                "links": {"round_trip_ms": self.round_trip_ms, "bad_share": 0},
                "days": {"hours": [0], "warm_up_s": _WARM_UP_S, "window_s": _COARSE_WINDOW_S},
            }
        )


@dataclass(frozen=True, slots=True)
class Row:
    """Figures of both simulators by name."""

    case: Case
    coarse: dict[str, float]
    fine: dict[str, float]

    def error(self, figure: str) -> float:
        """Of the coarse simulator, relative to the fine one."""
        return self.coarse[figure] / self.fine[figure] - 1.0


def compare(
    case: Case, file: Path, *, max_sequences: int = 64, processes: int | None = None
) -> Row:
    """Run a case in both; `file` keeps measured rates."""
    fleet = case.fleet(max_sequences)
    servers = Servers(fleet, cells([fleet], file, processes=processes))
    peaks = peak_rates(fleet, servers)
    overall = Simulation(fleet, servers, peaks).run().overall()
    coarse = {name: float(overall[name]) for name in FIGURES}
    return Row(case, coarse, _fine(case, fleet, float(peaks[0])))


def _fine(case: Case, fleet: Fleet, rate: float) -> dict[str, float]:
    from outrider_bench.simulator.simulation import simulate

    load = case.verifiers * case.load
    outcome = simulate(fine_scenario(case, fleet, rate), load)
    end = outcome.sample.seconds
    pairs = zip(outcome.sample.ttft, outcome.sample.requests, strict=True)
    begun = [(ttft, *request) for ttft, request in pairs]
    counted = [r for r in begun if _WARM_UP_S <= r[1] - r[0] <= end - _TAIL_S and r[3] > 1]
    made = sum(map(partial(_tokens_between, end), begun))
    ttft_ms = 1000 * np.array([ttft for ttft, *_ in counted])
    tpot_ms = 1000 * np.array([(last - first) / (count - 1) for _, first, last, count in counted])
    return {
        "tokens_per_s": made / (end - _WARM_UP_S),
        "tpot_mean_ms": float(tpot_ms.mean()),
        "tpot_p50_ms": float(np.percentile(tpot_ms, 50)),
        "tpot_p99_ms": float(np.percentile(tpot_ms, 99)),
        "ttft_p50_ms": float(np.percentile(ttft_ms, 50)),
    }


def _tokens_between(end: float, request: tuple[float, float, float, int]) -> float:
    """Tokens of a request from the end of the warm-up to `end`, taken to come evenly."""
    _, first, last, count = request
    if last <= first:
        if _WARM_UP_S <= first <= end:
            return float(count)
        return 0.0
    part = (min(last, end) - max(first, _WARM_UP_S)) / (last - first)
    return count * max(part, 0.0)


def fine_scenario(case: Case, fleet: Fleet, rate: float) -> Scenario:
    """The case for the engine-level simulator; `rate` is of Poisson arrivals, at all verifiers."""
    load = case.verifiers * case.load
    drafters: list[dict[str, Any]] = [
        {
            "name": f"drafter-{verifier}-{number}",
            "family": "model",
            "verifier": f"verifier-{verifier + 1}",
            "acceptance": case.acceptance,
            "round_trip_ms": case.round_trip_ms,
        }
        for verifier in range(case.verifiers)
        for number in range(case.drafters)
    ]
    return Scenario.model_validate(
        {
            "seed": fleet.seed + 1,
            "costs": case.costs,
            "arrivals": case.arrivals,
            "rate": rate,
            "seconds": _WARM_UP_S + max(_FINE_WINDOW_S, _FINE_SEQUENCE_S / load) + _TAIL_S,
            "sequences": [load],
            "verifiers": case.verifiers,
            "drafters": drafters,
            "prompt_tokens": fleet.traffic.prompt_tokens,
            "output_tokens": fleet.traffic.output_tokens,
            **fleet.verifiers.model_dump(),
        }
    )


def table(rows: Sequence[Row]) -> Table:
    """The cases with the errors of each figure."""
    found = Table(title="coarse beside fine: relative errors")
    names = ("costs", "acceptance", "round trip (ms)", "verifiers", "load", "drafters", "arrivals")
    for name in (*names, "fine tokens/s", "coarse", *FIGURES):
        found.add_column(name, justify="right")
    for row in rows:
        case = row.case
        what = (case.costs, case.acceptance, case.round_trip_ms, case.verifiers, case.load)
        rates = [f"{side['tokens_per_s']:.0f}" for side in (row.fine, row.coarse)]
        errors = [f"{row.error(figure):+.1%}" for figure in FIGURES]
        found.add_row(*map(str, what), str(case.drafters), case.arrivals, *rates, *errors)
    return found


CASES = [
    Case(acceptance, round_trip_ms, verifiers, load, drafters, arrivals)
    for acceptance, round_trip_ms in ((0.5, 5.0), (0.8, 0.4), (0.8, 80.0), (0.95, 20.0))
    for verifiers, load, drafters, arrivals in (
        (1, 1, 1, "closed"),
        (1, 5, 1, "closed"),
        (2, 20, 1, "closed"),
        (1, 40, 4, "closed"),
        (4, 64, 1, "closed"),
        (2, 10, 1, "poisson"),
        (4, 40, 1, "poisson"),
    )
]
"""Loads between those at which rates are measured, but for 1 and 64."""
