"""The schema of a campaign's file. Unknown keys are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from outrider_bench.chaos.faults import FAULTS
from outrider_bench.yaml_file import first_problem, read


class Campaign(BaseModel):
    """Which faults are tried, for how long and how often."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, frozen=True)

    minutes: float = Field(5.0, gt=0, le=1440)
    """No round begins later."""

    seed: int = Field(0, ge=0)
    """The same seed and kinds give the same schedule."""

    kinds: list[str] = []
    """Names of the faults to play; all faults unless set."""

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
        """Names of the faults that each turn plays.

        These are `kinds` without the faults whose targets are all in `missing`, the parts that the
        stack lacks. Raises ValueError if no fault is left.
        """
        wanted = self.kinds or FAULTS
        chosen = [name for name in wanted if not missing.issuperset(FAULTS[name].targets)]
        if not chosen:
            parts = ", ".join(sorted(missing))
            raise ValueError(f"kinds: all of these faults need what the stack lacks: {parts}")
        return chosen


def load(path: Path | None, **given: Any) -> Campaign:
    """Read a campaign's file; without a file, the campaign has the default of each field.

    `given` are values of fields that replace the file's. Raises ValueError that names the file, the
    field and the problem.
    """
    if path is not None:
        return read(path, Campaign, **given)
    try:
        return Campaign.model_validate(given)
    except ValidationError as error:
        raise ValueError(first_problem(error)) from error
