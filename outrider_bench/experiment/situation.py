"""The situation that advice is about: costs, places for a drafter, acceptance and batch."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.protocol.draft_messages import DraftBatch, Proposal, StepBatch, Verdict
from outrider_bench.simulator.costs import Costs
from outrider_bench.simulator.links import draft_bytes, step_bytes

_TYPICAL_DEPTH = 8


@dataclass(frozen=True, slots=True)
class Place:
    """A place where a drafter may run, with the settings of a simulated drafter there."""

    key: str
    name: str
    cost: str
    """A name in the cost table's `drafting`."""
    round_trip_ms: float
    jitter_ms: float = 0.0
    mbit_s: float = 0.0
    on_target_cores: bool = False
    interference: float = 0.0
    slowness: float = 1.0

    def round_trip_s(self, batch: int) -> float:
        """Seconds of the round trip of a verdict and a draft for each of `batch` sequences."""
        network_s = self.round_trip_ms / 1000
        if self.mbit_s == 0.0:
            return network_s
        return network_s + _round_trip_bytes(batch) / (self.mbit_s * 125_000)


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
    hit_rate: float
    batch: int

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


def _round_trip_bytes(batch: int) -> int:
    """Bytes on the wire, about, of a verdict and a draft for each sequence."""
    tokens = [0] * _TYPICAL_DEPTH
    drafts = DraftBatch([Proposal(number, 0, tokens) for number in range(batch)])
    verdicts = [Verdict(number, 0, tokens[:3], 2, _TYPICAL_DEPTH) for number in range(batch)]
    return draft_bytes(drafts) + step_bytes(StepBatch(verdicts=verdicts))
