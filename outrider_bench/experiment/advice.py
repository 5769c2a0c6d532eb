"""Works out advice: simulates each place for a drafter, and does the arithmetic. Prints nothing."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from outrider_bench.experiment import arithmetic
from outrider_bench.experiment.arithmetic import PAYS, Estimate, Times
from outrider_bench.experiment.situation import Place, Situation
from outrider_bench.simulator.costs import Costs
from outrider_bench.simulator.scenario import Scenario
from outrider_bench.simulator.simulation import simulate
from outrider_bench.ways import Sample

_TOKENS = 2000
_OUTPUT_TOKENS = [64, 192]
# Longer than all requests take.
_SECONDS = 1e6
_BISECTIONS = 6
_LEAST_ROUND_TRIP_MS = 0.05
_MAX_ROUND_TRIP_MS = 1000 * arithmetic.MAX_ROUND_TRIP_S
LIMITS = ("the drafter's speed", "the link", "acceptance", "the target's saturation")


@dataclass(frozen=True, slots=True)
class Simulated:
    """The result of a simulation."""

    speed: float
    """In multiples of plain decoding."""
    tokens_per_s: float
    tokens: float
    """Tokens of a sequence in a mean step."""
    step_s: float
    depth: float
    """Mean draft tokens of the steps that verified any."""
    undrafted_share: float
    """Share of the steps that verified none."""


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """The theory of one place at one batch."""

    times: Times
    ways: list[Estimate]
    expected: Estimate
    """Compared with the simulation."""
    break_even_round_trip_s: float | None
    break_even_acceptance: float | None


@dataclass(slots=True)
class BatchAdvice:
    """The advice for a batch. Break-evens and `halved` are those of another host."""

    situation: Situation
    plain_tokens_per_s: float
    simulated: dict[str, Simulated] = field(default_factory=dict)
    """By the key of the place."""
    arithmetic: dict[str, Arithmetic] = field(default_factory=dict)
    """By the key of the place."""
    break_even_round_trip_ms: float | None = None
    """None if drafting never pays, infinity if it pays up to a second."""
    break_even_acceptance: float | None = None
    """None if drafting never pays."""
    halved: dict[str, float] = field(default_factory=dict)
    """The speed when one of `LIMITS` is half as bad."""

    @property
    def batch(self) -> int:
        """The number of sequences."""
        return self.situation.batch

    @property
    def best(self) -> str | None:
        """The key of the fastest place; None where none pays."""
        key = max(self.simulated, key=lambda place: self.simulated[place].speed)
        if self.simulated[key].speed >= PAYS:
            return key
        return None

    @property
    def here(self) -> float:
        """The speed of the better place on this host, or of plain decoding."""
        own, host, _ = self.situation.places
        return max(self.simulated[own.key].speed, self.simulated[host.key].speed, 1.0)

    @property
    def pays_to_move(self) -> bool | None:
        """Whether the other host is the best place.

        None if the simulation and the arithmetic disagree on whether drafting pays there at all.
        """
        far = self.situation.far
        simulated = self.break_even_round_trip_ms
        pays = simulated is not None and self.situation.link_ms <= simulated
        shown = self.arithmetic[far.key]
        computed = shown.break_even_round_trip_s
        if pays != (computed is not None and shown.times.round_trip_s <= computed):
            return None
        return self.simulated[far.key].speed >= PAYS * self.here

    @property
    def limit(self) -> str:
        """The limit whose halving would bring the most."""
        return max(self.halved, key=lambda name: self.halved[name])


def advise(situation: Situation) -> BatchAdvice:
    """Simulate and compute everything; takes about ten seconds."""
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
        far, round_trip_ms=far.round_trip_ms / 2, jitter_ms=far.jitter_ms / 2, mbit_s=2 * far.mbit_s
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
    costs = situation.costs
    batch = situation.batch
    decode_step_s = arithmetic.step_s(situation.plain_costs, batch, 0)
    depths = range(1, arithmetic.MAX_DRAFT_TOKENS + 1)
    verify_s = [arithmetic.step_s(costs, batch, depth) for depth in depths]
    cost = costs.drafting[place.cost]
    return Times(
        (decode_step_s, *verify_s),
        place.slowness * cost.round_s,
        place.slowness * cost.of_token(batch),
        place.round_trip_s(batch),
    )


def _arithmetic(situation: Situation, place: Place) -> Arithmetic:
    acceptance = situation.acceptance
    times = times_of(situation, place)

    def pushed(times: Times, acceptance: float, depth: int) -> Estimate:
        return arithmetic.pushed(times, acceptance, depth, situation.hit_rate)

    ways = (arithmetic.synchronous, arithmetic.late, arithmetic.chain, pushed)
    strategy = arithmetic.expected
    if place.on_target_cores:
        strategy = arithmetic.taking_turns
    return Arithmetic(
        times,
        [arithmetic.best(way, times, acceptance) for way in ways],
        strategy(times, acceptance),
        arithmetic.break_even_round_trip_s(strategy, times, acceptance),
        arithmetic.break_even_acceptance(strategy, times),
    )


class Simulator:
    """Simulates a batch."""

    def __init__(self, plain: Path, drafted: Path, cheap: Path, batch: int) -> None:
        """The paths are files of cost tables: without a drafter, with one, and with one where
        draft tokens add half as much to a step."""
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
        table = self._drafted
        if cheap_verifying:
            table = self._cheap
        scenario = self._scenario(table, drafter)
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
        counters = sample.counters
        rate = _tokens_per_s(sample)
        steps = counters["step_seconds_count"]
        sequences = counters["step_sequences_sum"]
        drafts = counters.get("spec_decode_num_drafts", 0.0)
        tokens = counters["generation_tokens"] / sequences
        return Simulated(
            speed=rate / self.plain_tokens_per_s,
            tokens_per_s=rate,
            tokens=tokens,
            step_s=tokens * (sequences / steps) / rate,
            depth=counters.get("spec_decode_num_draft_tokens", 0.0) / max(drafts, 1.0),
            undrafted_share=1.0 - drafts / sequences,
        )


@contextmanager
def simulating(situation: Situation) -> Iterator[Simulator]:
    """A simulator with its cost tables in files, until the context ends."""
    with tempfile.TemporaryDirectory() as directory:
        plain = Path(directory, "plain.json")
        drafted = Path(directory, "drafted.json")
        cheap = Path(directory, "cheap.json")
        plain.write_text(situation.plain_costs.model_dump_json())
        drafted.write_text(situation.costs.model_dump_json())
        cheap.write_text(_with_cheap_verifying(situation.costs).model_dump_json())
        yield Simulator(plain, drafted, cheap, situation.batch)


def _with_cheap_verifying(costs: Costs) -> Costs:
    """The table with half the cost of tokens beyond the first of each sequence."""
    forwards = []
    for forward in costs.forwards:
        plain_s = costs.forward_s(forward.sequences, forward.sequences)
        forwards.append(forward.model_copy(update={"seconds": (forward.seconds + plain_s) / 2}))
    return costs.model_copy(update={"forwards": forwards})


def _tokens_per_s(sample: Sample) -> float:
    """The rate while the batch is full, since the end of a run depends on its last request."""
    return sample.full_tokens_per_s or sample.tokens_per_s
