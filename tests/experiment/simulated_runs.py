"""Folders of runs for tests of the report. The simulator makes their figures.

Bytes on links and CPU times are made up from the simulation's own figures.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

from outrider_bench.experiment.records import (
    DRAFTED,
    Folder,
    LinkTraffic,
    Machine,
    Measurement,
    ways_of,
)
from outrider_bench.experiment.spec import Cell, Experiment, Link
from outrider_bench.sample import Sample
from outrider_bench.simulator.scenario import Scenario
from outrider_bench.simulator.simulation import simulate

MACHINE = Machine(
    host="rig",
    processor="a simulated processor",
    cores=[0, 1, 2, 3],
    memory_bytes=16 * 2**30,
    gpus=[],
    kernel="6.8.0",
    python="3.11",
    torch="2.11.0",
)
ACCEPTANCE = {"ngram": 0.45, "model": 0.8}
"""Maps a drafter's family to its acceptance."""

NO_LINK = Link.model_validate({})
Settings = dict[str, Any]

ROUND_TRIP: Settings = {
    "name": "round-trip",
    "question": "How far from the target may a drafter sit?",
    "drafters": {"model": {"family": "model", "link": "wire"}},
    "links": {"wire": {}},
    "workload": {"batch": 4, "output_tokens": 48, "waves": 2},
    "sweep": {
        "use": [["model"]],
        "links.wire.mbit_s": [0, 1],
        "links.wire.round_trip_ms": [0, 5, 20, 100],
    },
}
PLACEMENT: Settings = {
    "name": "placement",
    "question": "Where should a draft model run?",
    "target": {"cores": "0-1"},
    "drafters": {
        "shared-cores": {"family": "model", "cores": "0-1"},
        "own-core": {"family": "model", "cores": "2"},
        "socket": {"family": "model", "cores": "2", "transport": "unix"},
        "ngram-own-core": {"family": "ngram", "cores": "2"},
        "ngram-socket": {"family": "ngram", "cores": "2", "transport": "unix"},
        "far": {"family": "model", "link": "wire"},
    },
    "links": {"wire": {"round_trip_ms": 40}},
    "workload": {"batch": 2, "output_tokens": 48, "waves": 2},
    "sweep": {
        "use": [
            ["shared-cores"],
            ["own-core"],
            ["socket"],
            ["ngram-own-core"],
            ["ngram-socket"],
            ["far"],
        ]
    },
}


def make_run(
    path: Path,
    settings: Settings,
    *,
    repetitions: int,
    sources: tuple[str, ...],
) -> Folder:
    """Simulate each cell in each decoding mode.

    Each repetition has noise and a seed of its own. Predictions have no noise.
    """
    experiment = Experiment.model_validate({**settings, "repetitions": repetitions})
    folder = Folder(path)
    folder.begin(
        {
            "machine": asdict(MACHINE),
            "commit": "0123abc",
            "experiment": experiment.model_dump(mode="json"),
            "began": "2026-11-24T20:00:00+00:00",
            "command": f"outrider lab run bench/experiments/{experiment.name}.yaml",
        }
    )
    for cell in experiment.cells():
        for way in ways_of(cell):
            if "measured" in sources:
                for number in range(repetitions):
                    folder.save(cell.key, number, measure(cell, way, seed=number, noise=0.05))
            if "predicted" in sources:
                predicted = measure(cell, way, seed=99, noise=0.0)
                folder.save(cell.key, 0, predicted, predicted=True)
    return folder


def measure(cell: Cell, way: str, *, seed: int, noise: float) -> Measurement:
    """Return one repetition of a decoding mode in a cell."""
    sample = _simulate(cell, way, seed, noise)
    measured = Measurement(way, sample)
    measured.texts_sha256 = hashlib.sha256(b"the texts").hexdigest()
    tokens = sample.tokens
    measured.cpu_s = {"verifier-1": 0.95 * sample.seconds, "gateway-1": 0.0002 * tokens}
    if way == DRAFTED:
        measured.cpu_s["drafter"] = 0.6 * sample.seconds
        received = sample.counters["draft_bytes"]
        measured.links = {"wire": LinkTraffic(int(received), 20 * tokens, 1)}
    return measured


def _simulate(cell: Cell, way: str, seed: int, noise: float) -> Sample:
    workload = cell.experiment.workload
    scenario = Scenario.model_validate(
        {
            "costs": "assumed-gpu",
            "seconds": 600.0,
            "seed": seed,
            "noise": noise,
            "sequences": [workload.batch],
            "waves": workload.waves,
            "output_tokens": [workload.output_tokens // 2, 3 * workload.output_tokens // 2],
            "drafters": _drafters(cell) if way == DRAFTED else [],
        }
    )
    return simulate(scenario, workload.batch, drafting=way == DRAFTED).sample


def _drafters(cell: Cell) -> list[Settings]:
    found = []
    for name in cell.experiment.use:
        drafter = cell.experiment.drafters[name]
        link = cell.experiment.links.get(drafter.link or "", NO_LINK)
        found.append(
            {
                "name": name,
                "cost": drafter.family,
                "acceptance": ACCEPTANCE[drafter.family],
                "round_trip_ms": 0.4 + _round_trip_ms(cell) - 0.2 * (drafter.transport == "unix"),
                "jitter_ms": link.jitter_ms,
                "mbit_s": link.mbit_s,
                "on_target_device": drafter.cores == cell.experiment.target.cores is not None,
            }
        )
    return found


def _round_trip_ms(cell: Cell) -> float:
    [name] = cell.experiment.use
    link = cell.experiment.drafters[name].link or ""
    return cell.experiment.links.get(link, NO_LINK).round_trip_ms
