"""The schema of a fleet: regions, verifiers, drafters, links, traffic, and what is compared.

Knows no results. Unknown keys are refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from outrider_bench.experiment.spec import Name
from outrider_bench.simulator import costs

Share = Annotated[float, Field(ge=0, le=1)]
Hour = Annotated[int, Field(ge=0, le=23)]
Lengths = Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1, max_length=2)]
"""A length, or the least and the most; all between are equally likely."""


def _as_list(value: object) -> object:
    if isinstance(value, list):
        return value
    return [value]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, frozen=True)


class Region(_Part):
    """Verifiers in one place and the clients near them."""

    verifiers: int = Field(ge=1, le=10_000)

    peak_sequences: int = Field(ge=1)
    """Requests under way in the busiest hour, if this region serves all of its own."""

    utc_offset_hours: float = Field(0.0, ge=-12, le=14)


class Traffic(_Part):
    """Lengths of requests, and how their rate follows each region's own time of day."""

    arrivals: Literal["poisson", "closed"] = "poisson"
    """poisson has new requests at the rate of the hour; closed keeps `peak_sequences` of each
    region under way, whatever the hour."""

    prompt_tokens: Lengths = [64]

    output_tokens: Lengths = [128]

    night_share: Share = 0.5
    """Rate of new requests in the quietest hour, over that of the busiest."""

    peak_hour: float = Field(15.0, ge=0, lt=24)
    """Local time of the busiest hour; the rate is a cosine about it."""

    between_regions_ms: float = Field(80.0, ge=0)
    """Round trip that the first token takes longer if another region serves the request."""

    client_ms: float = Field(0.5, ge=0)
    """From a client to a verifier of its region, in each direction."""


class Verifiers(_Part):
    """Settings of each verifier."""

    max_sequences: int = Field(128, ge=1, le=4096)

    max_batch_tokens: int = Field(512, ge=1)

    page_count: int = Field(8192, ge=1)


class Drafters(_Part):
    """The draft processes: `count` of them for each group of `shared_by` verifiers of a region."""

    count: int = Field(10, ge=0, le=1000)

    shared_by: int = Field(1, ge=1, le=10_000)
    """Verifiers that share them; each process drafts for all of these."""

    passes: Literal["together", "in-turn"] = "together"
    """How a process drafts for several verifiers: a pass for the sequences of all, or one for each
    verifier in turn."""

    max_sequences: int = Field(64, ge=1)
    """Most sequences of one process; a sequence that finds none with room decodes plainly."""

    cost: str = "model"
    """Which of the cost table's ways of drafting."""

    acceptance: Annotated[list[Share], BeforeValidator(_as_list), Field(min_length=1)] = [0.8]
    """Probability that a guess is right if those before it are, by place in the draft, the last for
    all further ones."""

    mean_up_s: float = Field(3600.0, gt=0)
    """A process runs for so long on average, then it is gone."""

    mean_down_s: float = Field(30.0, ge=0)
    """It is back after so long on average."""


class Links(_Part):
    """The link of each draft process to its verifiers. It is good, or bad for a while."""

    round_trip_ms: float = Field(0.4, ge=0)

    bad_round_trip_ms: float = Field(250.0, ge=0)

    bad_share: Share = 0.01
    """Share of links that are bad at any time."""

    mean_bad_s: float = Field(20.0, gt=0)
    """A link stays bad for so long on average."""


class Days(_Part):
    """The simulated hours. A window represents its hour, because loads change slowly."""

    hours: list[Hour] = Field(default=list(range(24)), min_length=1)
    """Hours of the day, UTC."""

    warm_up_s: float = Field(15.0, ge=0)
    """Simulated before each window, and not counted."""

    window_s: float = Field(30.0, gt=0)

    step_s: float = Field(0.1, gt=0, le=1)
    """Time step. Ends of requests are placed within a step."""


class Fleet(_Part):
    """A fleet file."""

    name: Name

    question: str = ""

    seed: int = 0

    costs: str = "assumed-gpu"
    """Cost table of the simulator: one that comes with it, or a file."""

    regions: dict[Name, Region] = Field(min_length=1)

    traffic: Traffic = Field(default_factory=lambda: Traffic.model_validate({}))

    verifiers: Verifiers = Field(default_factory=lambda: Verifiers.model_validate({}))

    drafters: Drafters = Field(default_factory=lambda: Drafters.model_validate({}))

    links: Links = Field(default_factory=lambda: Links.model_validate({}))

    days: Days = Field(default_factory=lambda: Days.model_validate({}))

    alternatives: dict[Name, dict[str, Any]] = Field(default_factory=dict)
    """Other fleets to compare with: values by their path, such as `drafters.count`."""

    alternative_hours: list[Hour] = Field(default=[0, 6, 12, 18], min_length=1)
    """The hours in which the fleet and its alternatives are compared."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        known = costs.load(self.costs).drafting
        if self.drafters.cost not in known:
            raise ValueError(
                f"drafters.cost must be one of {', '.join(known)}, not {self.drafters.cost!r}"
            )
        if self.links.bad_share >= 0.5:
            raise ValueError(f"links.bad_share must be below 0.5, not {self.links.bad_share}")
        for name in self.alternatives:
            self.alternative(name)
        return self

    def alternative(self, name: str) -> Fleet:
        """The fleet with an alternative's values in place, over `alternative_hours`.

        Raises ValueError that names the path that does not fit.
        """
        data = self.model_dump(mode="json", exclude={"alternatives"})
        data["days"]["hours"] = self.alternative_hours
        for path, value in self.alternatives[name].items():
            _put(data, name, path, value)
        try:
            return Fleet.model_validate(data)
        except ValidationError as error:
            raise ValueError(f"alternatives.{name}: {_first(error)}") from error


def _put(data: dict[str, Any], name: str, path: str, value: Any) -> None:
    *parents, last = path.split(".")
    place: Any = data
    for parent in parents:
        place = place.get(parent) if isinstance(place, dict) else None
    if not isinstance(place, dict) or last not in place:
        raise ValueError(f"alternatives.{name}.{path}: there is no such place in the fleet")
    place[last] = value


def load(path: Path) -> Fleet:
    """Read a fleet file; raises ValueError that names the file, the field and what is wrong."""
    try:
        return Fleet.model_validate(yaml.safe_load(path.read_text()))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: {error}") from error
    except ValidationError as error:
        raise ValueError(f"{path}: {_first(error)}") from error


def _first(error: ValidationError) -> str:
    details = error.errors()[0]
    place = ".".join(str(part) for part in details["loc"])
    message = str(details["msg"])
    return f"{place}: {message}" if place else message
