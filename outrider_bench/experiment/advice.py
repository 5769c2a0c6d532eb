"""Works out advice: simulates each place for a drafter. Prints nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from outrider_bench.intervals import shown_by
from outrider_bench.sample import Sample
from outrider_bench.settings import MAX_ACCEPTANCE
from outrider_bench.simulator.costs import Costs
from outrider_bench.simulator.scenario import Scenario
from outrider_bench.simulator.simulation import simulate

_TOKENS = 2000
_OUTPUT_TOKENS = [64, 192]
# Longer than all requests take.
_SECONDS = 1e6
_BISECTIONS = 6
_LEAST_ROUND_TRIP_MS = 0.05
_MAX_ROUND_TRIP_MS = 1000.0
PAYS = 1.02
"""Drafting pays from this multiple of plain decoding on."""
Verdict = Literal["yes", "no", "cannot tell"]
LIMITS = ("the drafter's speed", "the link", "acceptance", "the target's saturation")
SIMULATIONS = 3 + 2 * (2 + _BISECTIONS) + len(LIMITS)
"""Most simulations with a drafter that the advice for a batch takes."""


@dataclass(frozen=True, slots=True)
class Place:
    """A place where a drafter may run, with the settings of a simulated drafter there."""

    key: str
    name: str
    cost: str
    """A name in the cost table's `drafting`."""
    round_trip_ms: float
    jitter_ms: float = 0.0
    on_target_cores: bool = False
    interference: float = 0.0
    slowness: float = 1.0
    count: int = 1
    """Drafters there, which share the sequences."""


@dataclass(frozen=True, slots=True)
class Situation:
    """A batch, its costs and the places of its drafter."""

    plain_costs: Costs
    """While no drafter works."""
    costs: Costs
    """While a drafter works."""
    places: tuple[Place, Place, Place]
    """The target's cores, other cores of its host, and another host."""
    acceptance: float
    batch: int
    spread: float = 1.0
    """How much equal computations differed while the costs were measured, as a factor; 1 for a cost
    table."""
    measured: float | None = None
    """Speed of this drafter under the profile's own load, in multiples of plain decoding."""
    doubt: str = ""
    """Why the profile's own load cannot be right; "" if it can."""

    @property
    def near(self) -> Place:
        """Other cores of the target's host."""
        return self.places[1]

    @property
    def far(self) -> Place:
        """Another host."""
        return self.places[2]

    @property
    def link_ms(self) -> float:
        """The round trip of the link alone."""
        return self.far.round_trip_ms - self.near.round_trip_ms


@dataclass(frozen=True, slots=True)
class Simulated:
    """The result of a simulation."""

    speed: float
    """In multiples of plain decoding."""
    tokens_per_s: float
    tokens: float
    """Tokens of a sequence in a mean step."""
    depth: float
    """Mean draft tokens of the steps that verified any."""


@dataclass(slots=True)
class BatchAdvice:
    """The advice for a batch. Break-evens and `halved` are those of another host."""

    situation: Situation
    plain_tokens_per_s: float
    simulated: dict[str, Simulated] = field(default_factory=dict)
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
        """The key of the fastest place; None where none is shown to pay."""
        key = max(self.simulated, key=lambda place: self.simulated[place].speed)
        if self.simulated[key].speed >= max(PAYS, self.situation.spread) and not self.doubt:
            return key
        return None

    @property
    def doubt(self) -> str:
        """Why the costs contradict themselves; "" if they do not."""
        if self.situation.doubt or self.situation.measured is None:
            return self.situation.doubt
        measured, spread = self.situation.measured, self.situation.spread
        simulated = self.simulated[self.situation.near.key].speed
        sides = [shown_by(speed / spread, speed * spread) for speed in (measured, simulated)]
        if set(sides) != {"faster", "slower"}:
            return ""
        return (
            f"at batch {self.batch} its own load ran at {measured:.2f} × plain decoding, where the "
            f"simulation says {simulated:.2f} ×"
        )

    @property
    def here(self) -> float:
        """The speed of the better place on this host, or of plain decoding."""
        own, host, _ = self.situation.places
        return max(self.simulated[own.key].speed, self.simulated[host.key].speed, 1.0)

    @property
    def verdict(self) -> Verdict:
        """Whether the other host is the best place.

        A speed is known up to the factor `spread`, upwards and downwards. "cannot tell" is the
        answer where the gain may be one or none within that, and where the costs contradict
        themselves.
        """
        gain = self.simulated[self.situation.far.key].speed / self.here
        if self.doubt:
            return "cannot tell"
        if gain >= max(PAYS, self.situation.spread):
            return "yes"
        return "no" if gain * self.situation.spread < PAYS else "cannot tell"

    @property
    def limit(self) -> str:
        """The limit whose halving would bring the most."""
        return max(self.halved, key=lambda name: self.halved[name])


def advise(situation: Situation, tell: Callable[[], None] = lambda: None) -> BatchAdvice:
    """Simulate everything; takes about ten seconds. Calls `tell` after each simulation."""
    simulator = Simulator(situation, tell)
    advice = compare(situation, simulator)
    _find_break_evens(advice, simulator)
    advice.halved = halved(simulator, situation.far, situation.acceptance)
    return advice


def compare(situation: Situation, simulator: Simulator) -> BatchAdvice:
    """Simulate the places alone, without the break-evens and limits of another host."""
    advice = BatchAdvice(situation, simulator.plain_tokens_per_s)
    for place in situation.places:
        advice.simulated[place.key] = simulator.run(place, situation.acceptance)
    return advice


def _find_break_evens(advice: BatchAdvice, simulator: Simulator) -> None:
    situation = advice.situation
    near, far = situation.near, situation.far

    def at_distance(round_trip_ms: float) -> float:
        at = replace(far, round_trip_ms=near.round_trip_ms + round_trip_ms)
        return simulator.run(at, situation.acceptance).speed

    advice.break_even_round_trip_ms = longest_that_pays(
        at_distance, _LEAST_ROUND_TRIP_MS, _MAX_ROUND_TRIP_MS
    )
    advice.break_even_acceptance = lowest_that_pays(
        lambda lower: simulator.run(far, lower).speed, MAX_ACCEPTANCE
    )


def halved(simulator: Simulator, far: Place, acceptance: float) -> dict[str, float]:
    """Speed of the far place when one thing is half as bad.

    Drafting takes half the time, the link is twice as good, half as many guesses are wrong, or
    verifying adds half as much to a plain step.
    """
    nearer = replace(far, round_trip_ms=far.round_trip_ms / 2, jitter_ms=far.jitter_ms / 2)
    speeds = [
        simulator.run(far, acceptance, slowness=0.5).speed,
        simulator.run(nearer, acceptance).speed,
        simulator.run(far, (1 + acceptance) / 2).speed,
        simulator.run(far, acceptance, cheap_verifying=True).speed,
    ]
    return dict(zip(LIMITS, speeds, strict=True))


def longest_that_pays(speed: Callable[[float], float], low: float, high: float) -> float | None:
    """The largest value between `low` > 0 and `high` that pays, of a speed that falls with it.

    None if `low` does not pay, infinity if `high` pays.
    """
    if speed(low) < PAYS:
        return None
    if speed(high) >= PAYS:
        return math.inf
    return _edge(speed, low, high, lambda low, high: math.sqrt(low * high))


def lowest_that_pays(speed: Callable[[float], float], high: float) -> float | None:
    """The least value that pays, of a speed that rises with it; None if `high` does not pay."""
    if speed(high) < PAYS:
        return None
    return _edge(speed, high, 0.0, lambda low, high: (low + high) / 2)


def _edge(
    speed: Callable[[float], float],
    pays: float,
    pays_not: float,
    between: Callable[[float, float], float],
) -> float:
    """The value at which the speed stops paying, between `pays` and `pays_not`."""
    for _ in range(_BISECTIONS):
        middle = between(pays, pays_not)
        if speed(middle) >= PAYS:
            pays = middle
        else:
            pays_not = middle
    return pays


class Simulator:
    """Simulates a batch."""

    def __init__(self, situation: Situation, tell: Callable[[], None] = lambda: None) -> None:
        """Calls `tell` after each simulation of a drafter."""
        self._situation = situation
        self._tell = tell

    @cached_property
    def plain_tokens_per_s(self) -> float:
        """The rate of plain decoding."""
        return _tokens_per_s(self.sample(None, 0.0))

    def run(
        self,
        place: Place,
        acceptance: float,
        *,
        slowness: float = 1.0,
        cheap_verifying: bool = False,
    ) -> Simulated:
        """Simulate a drafter at a place."""
        sample = self.sample(place, acceptance, slowness=slowness, cheap_verifying=cheap_verifying)
        simulated = self._simulated(sample)
        self._tell()
        return simulated

    def sample(
        self,
        place: Place | None,
        acceptance: float,
        *,
        slowness: float = 1.0,
        cheap_verifying: bool = False,
    ) -> Sample:
        """The requests of plain decoding, or with the drafters at a place."""
        if place is None:
            return self._simulate(self._situation.plain_costs)
        drafter = {
            "family": "drafter",
            "acceptance": acceptance,
            "cost": place.cost,
            "slowness": slowness * place.slowness,
            "round_trip_ms": place.round_trip_ms,
            "jitter_ms": place.jitter_ms,
            "on_target_cores": place.on_target_cores,
            "interference": place.interference,
        }
        table = self._situation.costs
        if cheap_verifying:
            table = _with_cheap_verifying(table)
        return self._simulate(
            table, *({**drafter, "name": f"drafter{i or ''}"} for i in range(place.count))
        )

    def _simulate(self, table: Costs, *drafters: dict[str, Any]) -> Sample:
        batch = self._situation.batch
        scenario = {
            "costs": table,
            "seconds": _SECONDS,
            "sequences": [batch],
            "waves": max(2, -(-_TOKENS // (batch * sum(_OUTPUT_TOKENS) // 2))),
            "output_tokens": _OUTPUT_TOKENS,
            "max_sequences": max(128, batch),
            "drafters": list(drafters),
        }
        return simulate(Scenario.model_validate(scenario), batch, drafting=bool(drafters)).sample

    def _simulated(self, sample: Sample) -> Simulated:
        counters = sample.counters
        rate = _tokens_per_s(sample)
        sequences = counters["step_sequences_sum"]
        drafts = counters.get("spec_decode_num_drafts", 0.0)
        return Simulated(
            speed=rate / self.plain_tokens_per_s,
            tokens_per_s=rate,
            tokens=counters["generation_tokens"] / sequences,
            depth=counters.get("spec_decode_num_draft_tokens", 0.0) / max(drafts, 1.0),
        )


def _with_cheap_verifying(costs: Costs) -> Costs:
    """The table with half the cost of tokens beyond the first of each sequence."""
    forwards = []
    for forward in costs.forwards:
        plain_s = costs.forward_s(forward.sequences, forward.sequences)
        forwards.append(forward.model_copy(update={"seconds": (forward.seconds + plain_s) / 2}))
    return Costs.model_validate({**costs.model_dump(), "forwards": forwards})


def _tokens_per_s(sample: Sample) -> float:
    """The rate while the batch is full, since the end of a run depends on its last request."""
    return sample.full_tokens_per_s or sample.tokens_per_s
