"""A profile: measured costs of one target on one machine, in a JSON file."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from outrider_bench.experiment.calibration import Served
from outrider_bench.experiment.records import Machine
from outrider_bench.experiment.serving import ProfiledHead, Serving
from outrider_bench.simulator.costs import Costs
from outrider_bench.simulator.scenario import Share
from outrider_bench.yaml_file import first_problem


class Conditions(BaseModel):
    """What else ran on the machine during the measurements."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    load_averages: tuple[float, float]
    """Runnable processes in the minute before the measurements, and in their last minute."""
    spread: float = Field(ge=1)
    """The 90th percentile over the median of a fixed computation's times, before or after the
    measurements, whichever is larger."""

    def described(self, cores: list[int]) -> str:
        """In words."""
        before, after = self.load_averages
        return (
            f"under a load of {before:.1f} before and {after:.1f} at the end, its own included, on "
            f"{len(cores)} cores; equal computations differed by {self.spread:.2f} × "
            "(90th percentile over median)"
        )


class Profile(BaseModel):
    """Measured costs. They depend on no experiment."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    machine: dict[str, Any]
    fingerprint: str
    """The machine's."""
    commit: str
    measured_at: str
    """In UTC."""
    target: str
    draft: str
    head: ProfiledHead | None = None
    """The head that was measured, if any. `drafting` has its costs under `head`."""
    dtype: str
    threads: int = Field(ge=1)
    """The target's."""
    how: dict[str, str]
    """How each of the fields below was measured."""
    costs: Costs
    conditions: Conditions | None = None
    """None in profiles of versions that did not record it."""
    served: list[Served] = Field(default_factory=list)
    serving: list[Serving] = Field(default_factory=list)
    acceptance: dict[str, Share] = Field(default_factory=dict)
    """Chance that a draft token is accepted if those before it are, by family."""

    @property
    def cores(self) -> list[int]:
        """The machine's cores."""
        return list(self.machine["cores"])

    @property
    def described(self) -> str:
        """Where the costs come from, and what else ran while they were measured."""
        source = self.costs.source.partition(". ")[0]
        if self.conditions is None:
            return source
        return f"{source}, measured {self.conditions.described(self.cores)}"

    def at(self, way: str) -> list[Serving]:
        """The costs of serving in this way, the smallest batch first."""
        found = [serving for serving in self.serving if serving.way == way]
        return sorted(found, key=lambda serving: serving.batch)

    def save(self, path: Path) -> None:
        """Write the file."""
        path.write_text(self.model_dump_json(indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Profile:
        """Read a file; raises ValueError that names the file, the field and the problem."""
        try:
            return cls.model_validate_json(path.read_text())
        except OSError as error:
            raise ValueError(f"profile {path}: {error.strerror}") from error
        except ValidationError as error:
            raise ValueError(f"profile {path}: {first_problem(error)}") from error


def described(machine: Machine) -> dict[str, Any]:
    """A machine as JSON has it, with keys of NUMA nodes as text."""
    found = asdict(machine)
    found["numa_nodes"] = {str(node): cores for node, cores in machine.numa_nodes.items()}
    return found
