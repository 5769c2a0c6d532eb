"""Makes a profile of hardware that is not here: a cost table, and defaults for everything else."""

from __future__ import annotations

from typing import Any

from outrider_bench.experiment.calibration import BATCHES
from outrider_bench.experiment.cell_scenarios import threads_of
from outrider_bench.experiment.profile_record import Profile, described
from outrider_bench.experiment.records import Machine
from outrider_bench.experiment.serving import Serving
from outrider_bench.experiment.spec import Experiment
from outrider_bench.simulator import costs

TOPOLOGIES: dict[str, dict[int, list[int]]] = {"gb200": {0: [*range(72)], 1: [*range(72, 144)]}}
"""Cores by NUMA node, by cost table: those of the two Grace CPUs of a GB200 board."""
_ONE_NODE = {0: [*range(64)]}
_WAYS = ("plain", "ngram", "model")


def profile_of(experiment: Experiment) -> Profile:
    """The profile of the hardware of the experiment's cost table.

    Forwards and drafting are the table's. Serving slows nothing down, drafters on other cores take
    nothing from the target, and two processes on the same cores have half their speed. Raises
    ValueError that names the field.
    """
    try:
        table = costs.load(str(experiment.costs))
    except ValueError as error:
        raise ValueError(f"costs: {error}") from error
    nodes = TOPOLOGIES.get(str(experiment.costs), _ONE_NODE)
    cores = [core for node in nodes.values() for core in node]
    round_trip_s = table.host_link.round_trip_ms / 1000
    target = experiment.target
    return Profile(
        machine=_machine(str(experiment.costs), table.source, nodes),
        fingerprint="assumed",
        commit="none",
        measured_at="never",
        target=str(target.model) + (" grown" if target.grown else ""),
        draft="models/draft",
        dtype=target.dtype,
        threads=threads_of(target, cores),
        how={"costs": table.source},
        costs=table,
        serving=[_serving(way, batch, round_trip_s) for way in _WAYS for batch in BATCHES],
    )


def _serving(way: str, batch: int, round_trip_s: float) -> Serving:
    return Serving(
        way=way,
        batch=batch,
        sequences=batch,
        slowdown=1.0,
        before_s=0.0,
        after_s=0.0,
        client_s=0.0005,
        round_trip_s=0.0 if way == "plain" else round_trip_s,
    )


def _machine(name: str, source: str, nodes: dict[int, list[int]]) -> dict[str, Any]:
    """The description of the machine, as a run's folder has it."""
    cores = [core for node in nodes.values() for core in node]
    host = f"{name}, assumed"
    return described(Machine(host, source, cores, nodes, 0, 0.0, [], "", "", ""))
