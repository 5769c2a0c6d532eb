"""Reads profiles, and makes profiles for hardware that is not here, from a table and defaults."""

from __future__ import annotations

import json
from dataclasses import asdict

from pydantic import ValidationError

from outrider_bench.experiment.calibration import BATCHES
from outrider_bench.experiment.cell_scenarios import threads_of
from outrider_bench.experiment.profile_record import NEVER, Profile
from outrider_bench.experiment.records import Machine
from outrider_bench.experiment.serving import Serving
from outrider_bench.experiment.spec import Target
from outrider_bench.simulator import costs
from outrider_bench.yaml_file import first_problem

TOPOLOGIES: dict[str, dict[int, list[int]]] = {"gb200": {0: [*range(72)], 1: [*range(72, 144)]}}
"""Maps a cost table to the cores of each NUMA node. A GB200 board has two Grace CPUs."""
_ONE_NODE = {0: [*range(64)]}


def load_profile(name: str, field: str) -> Profile:
    """Read a profile from a file, or make it from a cost table.

    The cost table is in a file, or comes with the simulator. Raises ValueError that names `field`,
    and the wrong field of the file if there is one.
    """
    try:
        path = costs.path_of(name)
        data = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"{field}: {name} cannot be read: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{field}: {name} is not JSON: {error}") from error
    except ValueError as error:
        raise ValueError(f"{field}: {error}") from error
    try:
        # A cost table has the field `forwards`; a profile has it in its cost table.
        if isinstance(data, dict) and "forwards" in data:
            return profile_of(name, Target.model_validate({}))
        return Profile.model_validate(data)
    except ValidationError as error:
        raise ValueError(f"{field}: {name}: {first_problem(error)}") from error


def profile_of(name: str, target: Target) -> Profile:
    """Make the profile for a target on the hardware that a cost table describes.

    The table has the times of forwards, of drafting and of the host's work. The profile assumes
    that serving slows nothing down, that drafters on other cores take nothing from the target, and
    that each of two processes on the same cores has half its speed. Raises ValueError that names
    the field.
    """
    try:
        table = costs.load(name)
    except ValidationError:
        raise
    except ValueError as error:
        raise ValueError(f"costs: {error}") from error
    nodes = TOPOLOGIES.get(name, _ONE_NODE)
    cores = [core for node in nodes.values() for core in node]
    machine = Machine(f"{name}, assumed", table.source, cores, 0, [], "", "", "")
    return Profile(
        machine=asdict(machine),
        fingerprint="assumed",
        commit="none",
        measured_at=NEVER,
        target=str(target.model) + (" grown" if target.grown else ""),
        draft="models/draft",
        dtype=target.dtype,
        threads=threads_of(target, cores),
        how={"costs": table.source},
        costs=table,
        serving=[
            Serving(
                way="plain",
                batch=batch,
                sequences=batch,
                slowdown=1.0,
                before_s=table.plan_step_s + batch * table.plan_sequence_s,
                after_s=table.host_step_s + batch * table.host_sequence_s,
                client_s=0.0005,
            )
            for batch in BATCHES
        ],
    )
