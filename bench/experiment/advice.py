"""Works out advice: each place for a drafter, simulated and by arithmetic. Prints nothing."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.experiment import arithmetic
from bench.experiment.arithmetic import PAYS, Estimate, Times
from bench.experiment.situation import Place, Situation
from bench.simulator.costs import Costs
from bench.simulator.scenario import Scenario
from bench.simulator.simulation import simulate
from bench.ways import Sample

_TOKENS = 2000
_OUTPUT_TOKENS = [64, 192]
# All requests end long before.
_SECONDS = 1e6
_BISECTIONS = 6
_LEAST_ROUND_TRIP_MS = 0.05
_MAX_ROUND_TRIP_MS = 1000 * arithmetic.MAX_ROUND_TRIP_S
LIMITS = ("the drafter's speed", "the link", "acceptance", "the target's saturation")


@dataclass(frozen=True, slots=True)
class Simulated:
    """The result of a simulation. `depth` is of the steps that verified a draft.

    `undrafted_share` of the steps of sequences verified none.
    """

    speed: float
    tokens_per_s: float
    tokens: float
    step_s: float
    depth: float
    undrafted_share: float


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """By theory, of one place at one batch. The simulation is compared with `expected`."""

    times: Times
    ways: list[Estimate]
    expected: Estimate
    break_even_round_trip_s: float | None
    break_even_acceptance: float | None


@dataclass(slots=True)
class BatchAdvice:
    """The advice for a batch. `simulated` and `arithmetic` are by place, the rest of the far one.

    A break-even is None where drafting never pays. That of the round trip is infinite where
    drafting pays up to a second. `halved` has the speed when one of `LIMITS` is half as bad.
    """

    situation: Situation
    plain_tokens_per_s: float
    simulated: dict[str, Simulated] = field(default_factory=dict)
    arithmetic: dict[str, Arithmetic] = field(default_factory=dict)
    break_even_round_trip_ms: float | None = None
    break_even_acceptance: float | None = None
    halved: dict[str, float] = field(default_factory=dict)

    @property
    def batch(self) -> int:
        return self.situation.batch

    @property
    def best(self) -> str | None:
        """The key of the fastest place; None where none pays."""
        key = max(self.simulated, key=lambda place: self.simulated[place].speed)
        return key if self.simulated[key].speed >= PAYS else None

    @property
    def limit(self) -> str:
        """What of drafter, link, acceptance and target would bring most, were it half as bad."""
        return max(self.halved, key=lambda name: self.halved[name])


def advise(situation: Situation) -> BatchAdvice:
    """Simulate and compute all of it; takes some ten seconds."""
    acceptance = situation.acceptance
    with simulating(situation) as simulator:
        advice = BatchAdvice(situation, simulator.plain_tokens_per_s)
        for place in situation.places:
            advice.simulated[place.key] = simulator.run(place, acceptance)
            advice.arithmetic[place.key] = _arithmetic(situation, place)
        _find_break_evens(advice, simulator)
        advice.halved = halved(simulator, situation.far, acceptance)
    return advice


def _find_break_evens(advice: BatchAdvice, simulator: Simulator) -> None:
    situation = advice.situation
    near, far = situation.near, situation.far

    def at_distance(round_trip_ms: float) -> float:
        at = replace(far, round_trip_ms=near.round_trip_ms + round_trip_ms)
        return simulator.run(at, situation.acceptance).speed

    advice.break_even_round_trip_ms = arithmetic.longest_that_pays(
        at_distance, _LEAST_ROUND_TRIP_MS, _MAX_ROUND_TRIP_MS, _BISECTIONS
    )
    advice.break_even_acceptance = arithmetic.lowest_that_pays(
        lambda lower: simulator.run(far, lower).speed, arithmetic.MAX_ACCEPTANCE, _BISECTIONS
    )


def halved(simulator: Simulator, far: Place, acceptance: float) -> dict[str, float]:
    """Speed of the far place when one thing is half as bad.

    Drafting takes half the time, the link is twice as good, half as many guesses are wrong, or
    verifying adds half as much to a plain step.
    """
    nearer = replace(
        far,
        round_trip_ms=far.round_trip_ms / 2,
        jitter_ms=far.jitter_ms / 2,
        mbit_s=2 * far.mbit_s,
    )
    speeds = [
        simulator.run(far, acceptance, slowness=0.5).speed,
        simulator.run(nearer, acceptance).speed,
        simulator.run(far, (1 + acceptance) / 2).speed,
        simulator.run(far, acceptance, cheap_verifying=True).speed,
    ]
    return dict(zip(LIMITS, speeds, strict=True))


def times_of(situation: Situation, place: Place) -> Times:
    """The times of a place by the cost tables."""
    costs, batch = situation.costs, situation.batch
    plain_s = arithmetic.step_s(situation.plain_costs, batch, 0)
    depths = range(1, arithmetic.MAX_DRAFT_TOKENS + 1)
    verify_s = [arithmetic.step_s(costs, batch, depth) for depth in depths]
    cost = costs.drafting[place.cost]
    return Times(
        (plain_s, *verify_s),
        place.slowness * cost.round_s,
        place.slowness * cost.of_token(batch),
        place.round_trip_s(batch),
    )


def _arithmetic(situation: Situation, place: Place) -> Arithmetic:
    acceptance, times = situation.acceptance, times_of(situation, place)

    def pushed(times: Times, acceptance: float, depth: int) -> Estimate:
        return arithmetic.pushed(times, acceptance, depth, situation.hit_rate)

    ways = (arithmetic.synchronous, arithmetic.late, arithmetic.chain, pushed)
    strategy = arithmetic.taking_turns if place.on_target_cores else arithmetic.expected
    return Arithmetic(
        times,
        [arithmetic.best(way, times, acceptance) for way in ways],
        strategy(times, acceptance),
        arithmetic.break_even_round_trip_s(strategy, times, acceptance),
        arithmetic.break_even_acceptance(strategy, times),
    )


class Simulator:
    """Simulates a batch. `plain`, `drafted` and `cheap` are files of cost tables.

    `drafted` holds while a drafter is at work. In `cheap` verifying adds half as much.
    """

    def __init__(self, plain: Path, drafted: Path, cheap: Path, batch: int) -> None:
        self.batch = batch
        self._drafted = drafted
        self._cheap = cheap
        sample = simulate(self._scenario(plain), batch, drafting=False).sample
        self.plain_tokens_per_s = _tokens_per_s(sample)

    def run(
        self,
        place: Place,
        acceptance: float,
        *,
        slowness: float = 1.0,
        cheap_verifying: bool = False,
    ) -> Simulated:
        """Simulate a drafter at a place."""
        drafter = {
            "name": "drafter",
            "acceptance": acceptance,
            "cost": place.cost,
            "slowness": slowness * place.slowness,
            "round_trip_ms": place.round_trip_ms,
            "jitter_ms": place.jitter_ms,
            "mbit_s": place.mbit_s,
            "on_target_cores": place.on_target_cores,
            "interference": place.interference,
        }
        scenario = self._scenario(self._cheap if cheap_verifying else self._drafted, drafter)
        return self._simulated(simulate(scenario, self.batch).sample)

    def _scenario(self, table: Path, *drafters: dict[str, Any]) -> Scenario:
        waves = max(2, -(-_TOKENS // (self.batch * sum(_OUTPUT_TOKENS) // 2)))
        return Scenario.model_validate(
            {
                "costs": str(table),
                "seconds": _SECONDS,
                "sequences": [self.batch],
                "waves": waves,
                "output_tokens": _OUTPUT_TOKENS,
                "max_sequences": max(128, self.batch),
                "drafters": list(drafters),
            }
        )

    def _simulated(self, sample: Sample) -> Simulated:
        counters, rate = sample.counters, _tokens_per_s(sample)
        steps, sequences = counters["step_seconds_count"], counters["step_sequences_sum"]
        drafts = counters.get("spec_decode_num_drafts", 0.0)
        tokens = counters["generation_tokens"] / sequences
        return Simulated(
            speed=rate / self.plain_tokens_per_s,
            tokens_per_s=rate,
            tokens=tokens,
            step_s=tokens * (sequences / steps) / rate,
            depth=counters.get("spec_decode_num_draft_tokens", 0.0) / drafts if drafts else 0.0,
            undrafted_share=1.0 - drafts / sequences,
        )


@contextmanager
def simulating(situation: Situation) -> Iterator[Simulator]:
    """A scenario names its cost table by file."""
    with tempfile.TemporaryDirectory() as directory:
        tables = {
            "plain": situation.plain_costs,
            "drafted": situation.costs,
            "cheap": _with_cheap_verifying(situation.costs),
        }
        paths = []
        for name, table in tables.items():
            paths.append(Path(directory, f"{name}.json"))
            paths[-1].write_text(table.model_dump_json())
        plain, drafted, cheap = paths
        yield Simulator(plain, drafted, cheap, situation.batch)


def _with_cheap_verifying(costs: Costs) -> Costs:
    """The table of a target for which tokens beyond the first of each sequence cost half."""
    forwards = []
    for forward in costs.forwards:
        plain_s = costs.forward_s(forward.sequences, forward.sequences)
        forwards.append(forward.model_copy(update={"seconds": (forward.seconds + plain_s) / 2}))
    return costs.model_copy(update={"forwards": forwards})


def _tokens_per_s(sample: Sample) -> float:
    """While the batch is full: how a run ends depends on which request is the last."""
    return sample.full_tokens_per_s or sample.tokens_per_s
