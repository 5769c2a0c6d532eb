"""A profile: measured costs of one target on one machine, in a JSON file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from outrider_bench.experiment.calibration import Served
from outrider_bench.experiment.serving import Serving, busy
from outrider_bench.simulator.costs import Costs

NEVER = "never"
"""The value of `measured_at` in a profile that was made from a cost table."""


class Conditions(BaseModel):
    """The machine's load before the measurements and at their end."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    load_averages: tuple[float, float]
    """The mean number of runnable processes in the minute before the measurements, and in their
    last minute."""
    spread: float = Field(ge=1)
    """The 90th percentile over the median of a fixed computation's times, before or after the
    measurements, whichever is larger."""

    def described(self, cores: list[int]) -> str:
        """Return a description of the load."""
        before, after = self.load_averages
        return (
            f"under a load of {before:.1f} before and {after:.1f} at the end, its own included, on "
            f"{len(cores)} cores; equal computations differed by {self.spread:.2f} × "
            "(90th percentile over median)"
        )


class Profile(BaseModel):
    """Measured costs, which depend on no experiment."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    machine: dict[str, Any]
    fingerprint: str
    """The machine's fingerprint."""
    commit: str
    measured_at: str
    """In UTC."""
    target: str
    draft: str
    dtype: str
    threads: int = Field(ge=1)
    """The number of the target's threads."""
    how: dict[str, str]
    """How each of the fields below was measured."""
    costs: Costs
    conditions: Conditions | None = None
    """None in profiles of older versions, which did not record the conditions."""
    served: list[Served] = Field(default_factory=list)
    serving: list[Serving] = Field(min_length=2)

    @property
    def spread(self) -> float | None:
        """The factor by which equal computations differed while measuring; None if unknown."""
        return self.conditions.spread if self.conditions is not None else None

    @property
    def cores(self) -> list[int]:
        """The machine's cores."""
        return list(self.machine["cores"])

    @property
    def described(self) -> str:
        """The origin of the costs, and the machine's load when they were measured."""
        source = self.costs.source.partition(". ")[0]
        if self.conditions is None:
            return source
        return f"{source}, measured {self.conditions.described(self.cores)}"

    def serving_at(self, way: str, batch: int) -> Serving:
        """Return the costs of serving in a decoding mode, for a batch size.

        The slowness and the times of the network are interpolated between batch sizes. The other
        fields are those of the smallest batch.
        """
        low, high = self._at(way)
        share = min(max((batch - low.batch) / max(high.batch - low.batch, 1), 0.0), 1.0)
        names = ("client_s", "round_trip_s", "jitter_s", "slowness")
        between = {
            name: getattr(low, name) + share * (getattr(high, name) - getattr(low, name))
            for name in names
        }
        return low.model_copy(update=between)

    def costs_at(self, way: str, *, beside: bool = True) -> Costs:
        """Return the cost table for a machine that serves in a decoding mode.

        With `beside`, drafters on other cores of the host slow down the forwards; else they do not.
        """
        low, high = self._at(way)
        if not beside:
            plain = zip(self._at("plain"), (low, high), strict=True)
            low, high = (one.with_host_times(own) for one, own in plain)
        return busy(self.costs, low, high)

    def _at(self, way: str) -> tuple[Serving, Serving]:
        """Return the costs of serving in a decoding mode at the smallest and the largest batch.

        A mode that was not measured has the costs of plain decoding, and the network of the table's
        `host_link`.
        """
        found = [serving for serving in self.serving if serving.way == way]
        if not found:
            link = self.costs.host_link
            network = {
                "way": way,
                "round_trip_s": link.round_trip_ms / 1000,
                "jitter_s": link.jitter_ms / 1000,
            }
            plains = [serving for serving in self.serving if serving.way == "plain"]
            found = [plain.model_copy(update=network) for plain in plains]
        found.sort(key=lambda serving: serving.batch)
        return found[0], found[-1]

    def save(self, path: Path) -> None:
        """Write the file."""
        path.write_text(self.model_dump_json(indent=1) + "\n")
