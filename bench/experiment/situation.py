"""The situation that advice is about: costs, places for a drafter, acceptance and batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from bench.experiment.acceptance import share_of_right
from bench.experiment.arithmetic import MAX_ACCEPTANCE
from bench.simulator.costs import Costs
from bench.simulator.links import draft_bytes, step_bytes
from bench.simulator.traffic import RecordedRequest
from outrider.messages import DraftBatch, Proposal, StepBatch, Verdict

_TYPICAL_DEPTH = 8


@dataclass(frozen=True, slots=True)
class Place:
    """Where a drafter may run. `cost` is the cost table's way of drafting there.

    The other fields are those of a simulated drafter.
    """

    key: str
    name: str
    cost: str
    round_trip_ms: float
    jitter_ms: float = 0.0
    mbit_s: float = 0.0
    on_target_cores: bool = False
    interference: float = 0.0
    slowness: float = 1.0

    def round_trip_s(self, batch: int) -> float:
        """Of a verdict and a draft for each of `batch` sequences, with the time of their bytes."""
        bytes_per_s = self.mbit_s * 125_000
        transfer_s = _round_trip_bytes(batch) / bytes_per_s if bytes_per_s else 0.0
        return self.round_trip_ms / 1000 + transfer_s


@dataclass(frozen=True, slots=True)
class Situation:
    """A batch and its drafter's places: the target's cores, other cores of the host, another host.

    `plain_costs` hold while nothing is drafted. `costs` hold while a drafter is at work.
    """

    plain_costs: Costs
    costs: Costs
    places: tuple[Place, Place, Place]
    acceptance: float
    hit_rate: float
    batch: int

    @property
    def near(self) -> Place:
        return self.places[1]

    @property
    def far(self) -> Place:
        return self.places[2]

    @property
    def link_ms(self) -> float:
        """The round trip of the link alone."""
        return self.far.round_trip_ms - self.near.round_trip_ms


def measured_acceptance(recording: Path, drafter: str) -> float:
    """The share of a recording's tokens that the drafter guesses right; no guess counts as wrong.

    Raises ValueError that names the setting and the line.
    """
    guesses = list(_guesses(recording, drafter))
    if not any(guesses):
        raise ValueError(f"recording: {recording} has no tokens")
    return min(share_of_right(guesses), MAX_ACCEPTANCE)


def _guesses(recording: Path, drafter: str) -> Iterator[str]:
    try:
        lines = recording.read_text().splitlines()
    except OSError as error:
        raise ValueError(f"recording: {recording} cannot be read: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        try:
            request = RecordedRequest.model_validate_json(line)
        except ValidationError as error:
            details = error.errors()[0]
            place = ".".join(map(str, details["loc"]))
            problem = f"{place}: {details['msg']}"
            raise ValueError(f"recording: line {number} of {recording}: {problem}") from error
        if drafter not in request.guesses:
            known = ", ".join(sorted(request.guesses)) or "(none)"
            problem = f"has guesses of {known}, not of {drafter!r}"
            raise ValueError(f"recording: line {number} of {recording} {problem}")
        yield request.guesses[drafter]


def _round_trip_bytes(batch: int) -> int:
    """About how many bytes a verdict and a draft for each sequence have on the wire."""
    tokens = [0] * _TYPICAL_DEPTH
    drafts = DraftBatch([Proposal(number, 0, tokens) for number in range(batch)])
    verdicts = [Verdict(number, 0, tokens[:3], 2, _TYPICAL_DEPTH) for number in range(batch)]
    return draft_bytes(drafts) + step_bytes(StepBatch(verdicts=verdicts))
