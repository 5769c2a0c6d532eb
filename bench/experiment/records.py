"""What an experiment leaves on disk: one JSON file a measurement, in a folder of one machine, one commit and one experiment.

    OUT/<experiment>/<fingerprint>/run.json                   machine, commit, the experiment, when it began
    OUT/<experiment>/<fingerprint>/cells/<cell>/<way>.<n>.json   repetition n of a way in a cell
    OUT/<experiment>/<fingerprint>/predicted/<cell>/<way>.<n>.json   the same, simulated

Files are written whole or not at all, so an interrupted run goes on where it stopped. Figures of different machines, commits or
experiments never share a folder.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.experiment.spec import Experiment
from bench.ways import Sample

PLAIN = "plain"
"""Plain decoding, with no drafter running."""
IDLE = "idle"
"""Plain decoding beside drafters that are connected and idle."""
DRAFTED = "drafted"
"""Speculative decoding with the drafters of the cell."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Where something was measured. Two runs with equal `fingerprint` may share a folder."""

    host: str
    processor: str
    cores: list[int]
    numa_nodes: dict[int, list[int]]
    memory_bytes: int
    memory_bytes_per_s: float
    """Of one thread that reads; 0 where it was not measured."""
    gpus: list[str]
    kernel: str
    python: str
    torch: str

    @property
    def fingerprint(self) -> str:
        """Of what does not change between two runs on the same machine."""
        fixed = [self.host, self.processor, self.cores, self.memory_bytes, self.gpus, self.torch]
        return hashlib.sha256(json.dumps(fixed).encode()).hexdigest()[:8]


@dataclass(slots=True)
class LinkTraffic:
    """Bytes and connections that a link carried during a measurement. `up` is towards the verifier, or towards Redis."""

    up_bytes: int = 0
    down_bytes: int = 0
    connection_count: int = 0
    lost_segment_count: int = 0


@dataclass(slots=True)
class Measurement:
    """One repetition of one way in one cell.

    `samples` has one entry a verifier, or a turn; their counters are the verifier's metrics. `cpu_s` is CPU time in seconds by
    process. `step_split_s` are seconds by phase from spans, where these were recorded: forward, wait_compute, wait_network, pack,
    accept, commit, send. `timeline` has tokens by tenths of a second since the first request. `watts` is None where no counter of
    energy can be read.
    """

    way: str
    samples: list[Sample]
    cpu_s: dict[str, float] = field(default_factory=dict)
    links: dict[str, LinkTraffic] = field(default_factory=dict)
    step_split_s: dict[str, float] = field(default_factory=dict)
    timeline: list[int] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    watts: float | None = None
    texts_sha256: str = ""
    """Of all texts in order, so that greedy and seeded ones can be compared across ways."""
    errors: list[str] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        """Of all verifiers that serve at the same time. With verifiers in turn, look at each sample alone."""
        return sum(sample.tokens_per_s for sample in self.samples)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Measurement:
        samples = [Sample(**sample) for sample in data["samples"]]
        for sample in samples:
            sample.requests = [(first, last, count) for first, last, count in sample.requests]
        links = {name: LinkTraffic(**traffic) for name, traffic in data["links"].items()}
        return cls(**{**data, "samples": samples, "links": links})


class Folder:
    """The folder of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def of(cls, out: Path, experiment: Experiment, machine: Machine, commit: str) -> Folder:
        """The folder for this machine, this commit (with the digest of what is not committed) and this very experiment."""
        digest = hashlib.sha256(experiment.model_dump_json().encode()).hexdigest()[:8]
        return cls(out / experiment.name / f"{machine.fingerprint}-{commit}-{digest}")

    def begin(self, about: dict[str, Any]) -> None:
        """Write `run.json` unless it is there."""
        if not (self.path / "run.json").exists():
            self._write(self.path / "run.json", about)

    def about(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.path / "run.json").read_text())
        return found

    def has(self, cell_key: str, way: str, repetition: int) -> bool:
        return self._file(cell_key, way, repetition).exists()

    def save(
        self, cell_key: str, repetition: int, measurement: Measurement, *, predicted: bool = False
    ) -> None:
        file = self._file(cell_key, measurement.way, repetition, predicted=predicted)
        self._write(file, measurement.as_json())

    def measurements(
        self, cell_key: str, *, predicted: bool = False
    ) -> Iterator[tuple[int, Measurement]]:
        """All measurements of a cell with their repetition, in order of repetition."""
        files = self._cell(cell_key, predicted=predicted).glob("*.json")
        for file in sorted(files, key=lambda file: (int(file.stem.rsplit(".", 1)[1]), file.stem)):
            yield (
                int(file.stem.rsplit(".", 1)[1]),
                Measurement.from_json(json.loads(file.read_text())),
            )

    def _file(self, cell_key: str, way: str, repetition: int, *, predicted: bool = False) -> Path:
        return self._cell(cell_key, predicted=predicted) / f"{way}.{repetition}.json"

    def _cell(self, cell_key: str, *, predicted: bool) -> Path:
        return self.path / ("predicted" if predicted else "cells") / cell_key

    @staticmethod
    def _write(path: Path, data: dict[str, Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(data, indent=1))
        os.replace(partial, path)
