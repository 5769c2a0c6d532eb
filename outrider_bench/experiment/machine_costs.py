"""Costs of a machine while it serves and drafts, from a profile or from a cost table alone."""

from __future__ import annotations

import json
from dataclasses import dataclass

from pydantic import ValidationError

from outrider_bench.experiment.cell_scenarios import at_batch as between
from outrider_bench.experiment.profile_record import Profile
from outrider_bench.experiment.serving import SLOWNESS_ON_TARGET_CORES, Serving, busy
from outrider_bench.simulator import costs
from outrider_bench.simulator.costs import Costs
from outrider_bench.yaml_file import first_problem

_ELSEWHERE = " elsewhere"


@dataclass(frozen=True, slots=True)
class MachineCosts:
    """Costs of plain and of drafted decoding at a batch; `acceptance` is None if not known."""

    plain: Costs
    drafted: Costs
    round_trip_ms: float
    jitter_ms: float
    interference: float = 0.0
    slowness: float = 1.0
    slowness_on_target_cores: float = 1.0
    acceptance: float | None = None


def load(name: str) -> Profile | Costs:
    """Read a profile or a cost table from a file, or a cost table that comes with the simulator.

    Raises ValueError that names the setting, and the wrong field of the file.
    """
    path = costs.path_of(name)
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"costs: {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"costs: {path} is not JSON: {error}") from error
    # A cost table has forwards; a profile has them in its cost table.
    schema = Costs if isinstance(data, dict) and "forwards" in data else Profile
    try:
        return schema.model_validate(data)
    except ValidationError as error:
        raise ValueError(f"costs: {path}: {first_problem(error)}") from error


def at_batch(found: Profile | Costs, drafter: str, batch: int) -> MachineCosts:
    """The costs with a drafter, a name in the table's `drafting`, and `batch` sequences."""
    if isinstance(found, Costs):
        return _without_serving(found, None)
    # Serving is measured with one thread for each family, whatever place the drafter takes.
    family = drafter.partition("-")[0]
    acceptance = found.acceptance.get(family)
    plains = found.at("plain")
    own = found.at(family)
    if not plains or len(plains) != len(own):
        return _without_serving(found.costs, acceptance)
    serving = between(own, batch)
    return MachineCosts(
        busy(found.costs, plains[0], plains[-1]),
        _drafted(found.costs, plains, own, serving.message_s),
        1000 * serving.round_trip_s,
        1000 * serving.jitter_s,
        serving.interference,
        serving.slowness,
        SLOWNESS_ON_TARGET_CORES,
        acceptance,
    )


def _without_serving(table: Costs, acceptance: float | None) -> MachineCosts:
    link = table.host_link
    return MachineCosts(table, table, link.round_trip_ms, link.jitter_ms, acceptance=acceptance)


def elsewhere(table: Costs, cost: str) -> str:
    """The name in the table's `drafting` for the same drafter on another machine.

    Its messages cost the target's machine nothing.
    """
    name = cost + _ELSEWHERE
    return name if name in table.drafting else cost


def _drafted(costs: Costs, plains: list[Serving], own: list[Serving], message_s: float) -> Costs:
    """The table while drafters work. Each way of drafting is there twice, see `elsewhere`."""
    low = plains[0].with_host_times(own[0])
    high = plains[-1].with_host_times(own[-1])
    drafting = {}
    for name, cost in costs.drafting.items():
        drafting[name] = cost.model_copy(update={"message_s": message_s})
        drafting[name + _ELSEWHERE] = cost
    return busy(costs, low, high).model_copy(update={"drafting": drafting})
