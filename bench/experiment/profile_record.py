"""What `outrider profile` writes and `outrider experiment predict` reads: one JSON file for one target on one machine."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bench.experiment.calibration import Served
from bench.experiment.probes import Interference, RoundTrip
from bench.experiment.records import Machine
from bench.experiment.serving import Serving
from bench.simulator.costs import Costs
from bench.simulator.scenario import Share


class Profile(BaseModel):
    """Measured costs. Nothing in it depends on an experiment."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    machine: dict[str, Any]
    fingerprint: str
    """Of the machine."""
    commit: str
    measured_at: str
    """UTC."""
    target: str
    draft: str
    dtype: str
    threads: int = Field(ge=1)
    """Of the target."""
    how: dict[str, str]
    """How each of the fields below was measured."""
    costs: Costs
    links: dict[str, RoundTrip] = Field(default_factory=dict)
    interference: dict[str, Interference] = Field(default_factory=dict)
    served: list[Served] = Field(default_factory=list)
    serving: list[Serving] = Field(default_factory=list)
    acceptance: dict[str, Share] = Field(default_factory=dict)
    """Chance that a draft token stands if those before it do, by family."""

    @property
    def cores(self) -> list[int]:
        """Of the machine."""
        return list(self.machine["cores"])

    def at(self, way: str) -> list[Serving]:
        """What serving in this way costs, the smallest batch first."""
        return sorted(
            [serving for serving in self.serving if serving.way == way],
            key=lambda serving: serving.batch,
        )

    def save(self, path: Path) -> None:
        path.write_text(self.model_dump_json(indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Profile:
        """Raises ValueError that names the file, the field and what is wrong with it."""
        try:
            return cls.model_validate_json(path.read_text())
        except OSError as error:
            raise ValueError(f"profile {path}: {error.strerror}") from error
        except ValidationError as error:
            details = error.errors()[0]
            place = ".".join(map(str, details["loc"]))
            raise ValueError(f"profile {path}: {place}: {details['msg']}") from error


def described(machine: Machine) -> dict[str, Any]:
    """A machine as the file has it."""
    return {
        name: value if not isinstance(value, dict) else {str(k): v for k, v in value.items()}
        for name, value in asdict(machine).items()
    }
