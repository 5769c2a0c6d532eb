"""The schema of a campaign's file. Unknown keys are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from outrider_bench.chaos.faults import FAULTS


class Campaign(BaseModel):
    """Which faults are tried, for how long and how often."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, frozen=True)

    minutes: float = Field(5.0, gt=0, le=1440)
    """No round begins later."""

    seed: int = Field(0, ge=0)
    """The same seed and kinds give the same schedule."""

    kinds: list[str] = []
    """Names of faults; all of them unless set."""

    overlap: float = Field(0.5, ge=0, le=1)
    """Share of rounds in which a second fault joins the first."""

    clients: int = Field(16, ge=1, le=64)
    """Streams under way at once."""

    tls: bool = False
    """Mutual TLS between all processes, and HTTPS."""

    @model_validator(mode="after")
    def _knows_the_kinds(self) -> Self:
        unknown = set(self.kinds) - set(FAULTS)
        if unknown:
            known = ", ".join(FAULTS)
            raise ValueError(f"there is no fault {min(unknown)!r}; the faults are {known}")
        return self

    def bag(self, missing: frozenset[str]) -> list[str]:
        """The faults of one turn, but for those of missing parts."""
        wanted = self.kinds or FAULTS
        chosen = [name for name in wanted if not missing.issuperset(FAULTS[name].targets)]
        if not chosen:
            parts = ", ".join(sorted(missing))
            raise ValueError(f"kinds: all of these faults need what the stack lacks: {parts}")
        return chosen


def campaign_of(values: object) -> Campaign:
    """A campaign with these fields; raises ValueError that names the field and the problem."""
    try:
        return Campaign.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{place or 'the campaign'}: {first['msg']}") from error


def load(path: Path) -> Campaign:
    """Read a campaign's file; raises ValueError that names the file, the field and the problem."""
    try:
        return campaign_of(yaml.safe_load(path.read_text()) or {})
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
