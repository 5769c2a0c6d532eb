"""An experiment's results on disk: a folder for each machine, commit and experiment.

    OUT/<experiment>/<run>/run.json                         machine, commit, experiment, command
    OUT/<experiment>/<run>/cells/<cell>/<way>.<n>.json      repetition n of a way in a cell
    OUT/<experiment>/<run>/predicted/<cell>/<way>.<n>.json  the same, simulated

Each file is written whole or not at all, so an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from outrider_bench.experiment.spec import Cell, Experiment
from outrider_bench.sample import Sample

COSTS = Path("predicted/costs.json")
"""File in a run's folder: a sentence about the costs behind its predictions."""

PLAIN = "plain"
"""Plain decoding, without drafts."""
DRAFTED = "drafted"
"""Speculative decoding with the drafters of the cell."""
OURS = (PLAIN, DRAFTED)
"""The decoding modes."""


def ways_of(cell: Cell) -> list[str]:
    """Return the decoding modes that are measured for a cell (a combination of settings)."""
    return [PLAIN, DRAFTED] if cell.experiment.use else [PLAIN]


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine of a measurement. Runs with equal `fingerprint` may share a folder."""

    host: str
    processor: str
    cores: list[int]
    memory_bytes: int
    gpus: list[str]
    kernel: str
    python: str
    torch: str

    @property
    def fingerprint(self) -> str:
        """Eight digits of a hash of all fields except `kernel` and `python`."""
        fixed = [self.host, self.processor, self.cores, self.memory_bytes, self.gpus, self.torch]
        return hashlib.sha256(json.dumps(fixed).encode()).hexdigest()[:8]


@dataclass(slots=True)
class LinkTraffic:
    """The bytes and connections of a link in a measurement; `up` is towards the verifier."""

    up_bytes: int = 0
    down_bytes: int = 0
    connection_count: int = 0
    lost_segment_count: int = 0


@dataclass(slots=True)
class Measurement:
    """One repetition of one decoding mode in one cell."""

    way: str
    sample: Sample
    """The counters of the sample are the verifier's metrics."""
    cpu_s: dict[str, float] = field(default_factory=dict)
    """CPU seconds, keyed by process."""
    links: dict[str, LinkTraffic] = field(default_factory=dict)
    texts_sha256: str = ""
    """A hash of all texts in order, to compare greedy and seeded texts across modes."""
    errors: list[str] = field(default_factory=list)


_MEASUREMENT = TypeAdapter(Measurement)


class Folder:
    """The folder of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def of(cls, out: Path, experiment: Experiment, machine: Machine, commit: str) -> Folder:
        """Return the folder for this machine, experiment and commit.

        The function `commit` of the module `machine` returns the commit.
        """
        digest = hashlib.sha256(experiment.model_dump_json().encode()).hexdigest()[:8]
        return cls(out / experiment.name / f"{machine.fingerprint}-{commit}-{digest}")

    def begin(self, about: dict[str, Any]) -> None:
        """Write `run.json` unless the run has been started before."""
        if not (self.path / "run.json").exists():
            self._write(self.path / "run.json", about)

    def note_costs(self, sentence: str) -> None:
        """Record the origin of the costs behind the predictions."""
        self._write(self.path / COSTS, sentence)

    def about(self) -> dict[str, Any]:
        """Return the content of `run.json`. Raises OSError if the file is missing."""
        found: dict[str, Any] = json.loads((self.path / "run.json").read_text())
        return found

    def has(self, cell_key: str, way: str, repetition: int) -> bool:
        """Return whether a repetition of a decoding mode in a cell was measured."""
        return (self._cell(cell_key, predicted=False) / f"{way}.{repetition}.json").exists()

    def save(
        self, cell_key: str, repetition: int, measurement: Measurement, *, predicted: bool = False
    ) -> None:
        """Write a measurement, or a prediction."""
        cell = self._cell(cell_key, predicted=predicted)
        self._write(cell / f"{measurement.way}.{repetition}.json", asdict(measurement))

    def measurements(
        self, cell_key: str, *, predicted: bool = False
    ) -> Iterator[tuple[int, Measurement]]:
        """Yield each measurement of a cell with its repetition's number, in the numbers' order."""
        files = self._cell(cell_key, predicted=predicted).glob("*.json")
        numbered = sorted([(int(file.suffixes[-2][1:]), file) for file in files])
        for repetition, file in numbered:
            yield repetition, _MEASUREMENT.validate_json(file.read_text())

    def _cell(self, cell_key: str, *, predicted: bool) -> Path:
        return self.path / ("predicted" if predicted else "cells") / cell_key

    @staticmethod
    def _write(path: Path, data: dict[str, Any] | str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(data, indent=1))
        os.replace(partial, path)
