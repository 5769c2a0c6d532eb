"""The schema of an experiment file: target, drafters, links, workload and sweep.

This module uses no processes and no results. It refuses unknown keys.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from outrider.process.settings.config import Dtype
from outrider_bench import prompt_files
from outrider_bench.simulator.costs import LinkShape
from outrider_bench.yaml_file import first_problem, read

Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,31}$")]
Setting = str | int | float | bool
_RESERVED = ("verifier", "gateway", "link", "load")


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, frozen=True)


class Target(_Part):
    """The target model and the place of its verifier."""

    model: Path = Path("models/target")
    """Directory of the model, or smollm2 for SmolLM2-135M-Instruct."""

    grown: bool = False
    """Decode with the model grown to 154 M parameters, which computes the same function. It is
    made on first use."""

    dtype: Dtype = "float32"

    threads: int | None = Field(None, ge=1)
    """Threads of the verifier's forwards; unset takes one for each of its cores."""

    cores: str | None = None
    """Cores of the verifier, such as 0-3; unset takes any."""

    settings: dict[str, Setting] = Field(default_factory=dict)
    """Other settings of the verifier, as `outrider verifier --help` names them, but with
    underscores."""


class Drafter(_Part):
    """One kind of drafter and the place of its processes."""

    family: str = "ngram"
    """A family of `outrider drafter`, or in predictions synthetic. A synthetic drafter guesses
    right with the probability in `settings.acceptance`, such as 0.8, or "0.8,0.6" by position.
    Each guess takes `settings.token_ms`."""

    model: Path | None = None
    """Directory of a draft model, or of a head; unset is the family's bundled model."""

    count: int = Field(1, ge=1, le=64)
    """Number of processes."""

    transport: Literal["tcp", "unix", "in-process"] = "tcp"
    """How the drafter reaches the verifier; a Unix socket takes no link. in-process runs a draft
    model or a head in the verifier's own process and on the target's device, as
    `outrider verifier --in-process` does."""

    link: Name | None = None
    """The link to the verifier; unset is the loopback interface as it is."""

    cores: str | None = None
    """Cores to which the drafter is pinned; unset takes any cores."""

    numa_node: int | None = Field(None, ge=0)

    threads: int | None = Field(None, ge=1)

    device: str = "cpu"
    """The device of a draft model or head: cpu, cuda or cuda:N."""

    cost: str | None = None
    """For predictions, the drafter's name in the cost table's `drafting`; if unset, family and
    threads give the name."""

    host: Name | None = None
    """For predictions, any name for another machine; unset is the verifier's machine."""

    settings: dict[str, Setting] = Field(default_factory=dict)
    """Other settings of the drafter, as `outrider drafter --help` names them, but with
    underscores."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.transport == "unix" and (self.link or self.host):
            raise ValueError("transport unix takes no link and no host")
        if self.in_process:
            self._check_in_process()
        if self.numa_node is not None and self.cores is None:
            raise ValueError("numa_node has no meaning without cores")
        return self

    @property
    def in_process(self) -> bool:
        """True if the drafter is in the verifier's process."""
        return self.transport == "in-process"

    def _check_in_process(self) -> None:
        if self.link or self.host or self.cores or self.threads:
            problem = "takes no link, host, cores or threads: it runs in the verifier's process"
            raise ValueError(f"transport in-process {problem}")
        if self.count > 1:
            raise ValueError("transport in-process is one drafter, so count must be 1")


class Link(_Part, LinkShape):
    """A proxy's effect on connections; LinkShape documents the fields."""


class Workload(_Part):
    """The requests of the clients."""

    prompts: Path | None = None
    """File of own prompts: JSONL of Spec-Bench, MT-Bench, HumanEval or GSM8K, ShareGPT, rows with
    `prompt` or `messages`, or lines of text; unset takes prompts that come with Outrider."""

    kinds: list[str] = Field(default_factory=list)
    """Kinds of prompts, in turn; unset takes code, rewriting, json and chat, or all kinds of
    `prompts`: the categories of its rows, or else the file's name."""

    batch: int = Field(1, ge=1, le=256)
    """Number of requests that are kept in progress."""

    waves: int = Field(4, ge=1)
    """Requests in total, as a multiple of `batch`, but at least 8 requests."""

    output_tokens: int = Field(64, ge=1, le=4096)
    """Mean length of answers. The lengths lie between half and one and a half times the mean."""

    temperature: float = Field(0.0, ge=0, le=2)

    seed: int | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.prompts is None:
            prompt_files.of(None, self.kinds)
        return self


class Experiment(_Part):
    """An experiment file: one stack, its load, and the values that vary."""

    name: Name

    question: str = ""
    """The question that the experiment answers, for its report."""

    costs: str | None = None
    """Cost table of hardware that is not here. Such an experiment can only be predicted."""

    target: Target = Field(default_factory=lambda: Target.model_validate({}))

    drafters: dict[Name, Drafter] = Field(default_factory=dict)

    links: dict[Name, Link] = Field(default_factory=dict)

    workload: Workload = Field(default_factory=lambda: Workload.model_validate({}))

    use: list[Name] = Field(default_factory=list)
    """Names of the drafters that run; other drafters of the file are not started."""

    sweep: dict[str, list[Any]] = Field(default_factory=dict)
    """Values by path, such as `links.wire.round_trip_ms`, `workload.batch` or `use`. All
    combinations are measured."""

    skip: list[dict[str, Any]] = Field(default_factory=list)
    """Combinations of the sweep to leave out; each names some of the paths and their values."""

    repetitions: int = Field(3, ge=1, le=100)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if "use" not in self.model_fields_set and "use" not in self.sweep and self.drafters:
            raise ValueError(f"use must name the drafters that run, of {', '.join(self.drafters)}")
        _refuse_unknown("use", self.use, self.drafters)
        for name, drafter in self.drafters.items():
            if drafter.link is not None:
                _refuse_unknown(f"drafters.{name}.link", [drafter.link], self.links)
        for name in self.drafters:
            if name in _RESERVED:
                raise ValueError(f"drafters.{name}: another process has this name")
        if "costs" in self.sweep:
            raise ValueError("sweep: one run has one cost table, so costs cannot be swept")
        for combination in self.skip:
            _refuse_unknown("skip", list(combination), self.sweep)
        return self

    def cells(self) -> list[Cell]:
        """Return all combinations of the sweep.

        Raises ValueError that names the path of the sweep and the value that does not fit there.
        """
        found = []
        for values in itertools.product(*self.sweep.values()):
            point = dict(zip(self.sweep, values, strict=True))
            if not any(_agrees(point, combination) for combination in self.skip):
                found.append(Cell(point, self._at(point)))
        keys = [cell.key for cell in found]
        if twice := sorted({key for key in keys if keys.count(key) > 1}):
            raise ValueError(f"sweep: two cells would have the name {twice[0]!r}")
        return found

    def _at(self, point: Mapping[str, Any]) -> Experiment:
        data = self.model_dump(mode="json", exclude={"sweep", "skip"})
        for path, value in point.items():
            *parents, last = path.split(".")
            place: Any = data
            for parent in parents:
                place = place.get(parent) if isinstance(place, dict) else None
            if not isinstance(place, dict):
                raise ValueError(f"sweep.{path}: there is no such place in the experiment")
            place[last] = value
        try:
            return Experiment.model_validate(data)
        except ValidationError as error:
            shown = ", ".join(f"{path} = {json.dumps(value)}" for path, value in point.items())
            raise ValueError(f"sweep, at {shown}: {first_problem(error)}") from error


@dataclass(frozen=True, slots=True)
class Cell:
    """One combination: its values, keyed by path, and the experiment with them, without a sweep."""

    point: dict[str, Any]
    experiment: Experiment

    @property
    def key(self) -> str:
        """A name for files and tables, unique within the experiment."""
        words = [f"{path.rsplit('.', 1)[-1]}={_word(value)}" for path, value in self.point.items()]
        return ",".join(words) or "only"

    @property
    def stack_key(self) -> str:
        """A key equal for cells that one stack can serve: only their links and workloads differ."""
        return self.experiment.model_dump_json(include={"target", "drafters", "use"})

    @property
    def target_key(self) -> str:
        """A key that is equal for cells that the same verifier can serve."""
        in_process = {name: True for name, each in drafters_of(self.experiment) if each.in_process}
        return self.experiment.model_dump_json(include={"target": True, "drafters": in_process})


def load(path: Path) -> Experiment:
    """Read an experiment file; raise ValueError that names the file, the field and the problem."""
    experiment = read(path, Experiment)
    try:
        for cell in experiment.cells():
            workload = cell.experiment.workload
            prompt_files.of(workload.prompts, workload.kinds)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return experiment


def drafters_of(experiment: Experiment) -> Iterator[tuple[str, Drafter]]:
    """Yield the name and the settings of each drafter that a cell's experiment runs, in order."""
    for name in experiment.use:
        yield name, experiment.drafters[name]


def _refuse_unknown(field: str, names: list[str], known: Mapping[str, Any]) -> None:
    for name in names:
        if name not in known:
            listed = ", ".join(known) or "(none)"
            raise ValueError(f"{field}: must be one of {listed}, not {name!r}")


def _agrees(point: Mapping[str, Any], values: Mapping[str, Any]) -> bool:
    return all(point[path] == value for path, value in values.items())


def _word(value: Any) -> str:
    text = "+".join(map(str, value)) if isinstance(value, list) else str(value)
    return re.sub(r"[^A-Za-z0-9.+-]+", "-", text) or "none"
