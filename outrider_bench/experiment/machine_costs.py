"""Costs of a machine while it serves and drafts, from a profile or from a cost table alone."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from outrider_bench.experiment.cell_scenarios import at_batch as between
from outrider_bench.experiment.profile_record import Profile
from outrider_bench.experiment.serving import SLOWNESS_ON_TARGET_CORES, Serving, busy
from outrider_bench.experiment.spec import first_problem
from outrider_bench.simulator import costs
from outrider_bench.simulator.costs import Costs

_ELSEWHERE = " elsewhere"
# Between two processes of a host over gRPC, if there is no profile.
_HOST_ROUND_TRIP_MS = 0.4


@dataclass(frozen=True, slots=True)
class MachineCosts:
    """Costs of plain and of drafted decoding at a batch; `acceptance` is None if not known."""

    plain: Costs
    drafted: Costs
    round_trip_ms: float = _HOST_ROUND_TRIP_MS
    jitter_ms: float = 0.0
    interference: float = 0.0
    slowness: float = 1.0
    slowness_on_target_cores: float = 1.0
    acceptance: float | None = None


def load(path: Path | None, name: str | None) -> Profile | Costs:
    """Read a profile or a cost table from a file, or a cost table by its name.

    Raises ValueError that names the setting, and the wrong field of the file.
    """
    if path is None and name is None:
        raise ValueError("profile: give --profile FILE, or the name of a cost table with --costs")
    if path is not None and name is not None:
        raise ValueError("costs: give either --profile or --costs, not both")
    try:
        return _read(path) if path is not None else costs.load(str(name))
    except ValidationError as error:
        file = f"profile: {path}" if path is not None else f"costs: {name}"
        raise ValueError(f"{file}: {first_problem(error)}") from error


def _read(path: Path) -> Profile | Costs:
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"profile: {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"profile: {path} is not JSON: {error}") from error
    # A cost table has forwards; a profile has them in its cost table.
    schema = Costs if isinstance(data, dict) and "forwards" in data else Profile
    return schema.model_validate(data)


def at_batch(found: Profile | Costs, drafter: str, batch: int) -> MachineCosts:
    """The costs with a drafter, a name in the table's `drafting`, and `batch` sequences."""
    if isinstance(found, Costs):
        return MachineCosts(found, found)
    acceptance = found.acceptance.get(drafter.partition("-")[0])
    plains = found.at("plain")
    own = found.at(drafter)
    if not plains or len(plains) != len(own):
        return MachineCosts(found.costs, found.costs, acceptance=acceptance)
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
