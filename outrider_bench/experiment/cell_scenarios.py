"""Makes a simulator's scenario from an experiment's cell, a decoding mode and a profile.

A cell is a combination of settings. This module starts nothing and measures nothing.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from typing import Any

from outrider.process.settings.cores import parse_cores
from outrider.protocol.model_info import Placement
from outrider_bench.experiment.launches import SYNTHETIC
from outrider_bench.experiment.profile_record import Profile
from outrider_bench.experiment.records import PLAIN
from outrider_bench.experiment.serving import SLOWNESS_ON_TARGET_CORES
from outrider_bench.experiment.spec import Drafter, Experiment, Link, Target, drafters_of
from outrider_bench.simulator.costs import Costs, DraftingCost, way_of
from outrider_bench.simulator.recorded import RecordedRequest
from outrider_bench.simulator.scenario import Scenario
from verifier_svc.state.target_device import TargetDevice

_PREDICTED = ("ngram", "model", SYNTHETIC)
_SETTINGS = ("max_draft_len", "max_matching_ngram_size", "is_public_pool")
_VERIFIER_SETTINGS = (
    "draft_tokens",
    "max_batch_tokens",
    "max_sequences",
    "draft_trees",
    "always_draft",
    "prefix_caching",
    "page_count",
)
_LONGEST_S = 36_000.0
_DRAFTS_BY = {"ngram": "lookup", SYNTHETIC: "acceptance"}


def check(experiment: Experiment, profile: Profile) -> None:
    """Raise ValueError if the profile cannot predict this cell; the error names the field."""
    target = experiment.target
    cores = profile.cores
    name = str(target.model) + (" grown" if target.grown else "")
    if name != profile.target:
        raise ValueError(f"target.model: the profile is of {profile.target}, not of {name}")
    if target.dtype != profile.dtype:
        raise ValueError(f"target.dtype: the profile is of {profile.dtype}, not of {target.dtype}")
    threads = threads_of(target, cores)
    if threads != profile.threads:
        raise ValueError(f"target.threads: the profile has {profile.threads}, the cell {threads}")
    if experiment.workload.temperature > 0.0:
        raise ValueError(
            "workload.temperature: only 0 can be predicted, since guesses are recorded for greedy "
            "texts"
        )
    for name, drafter in drafters_of(experiment):
        _check_drafter(name, drafter, profile)


def _check_drafter(name: str, drafter: Drafter, profile: Profile) -> None:
    if drafter.family not in _PREDICTED:
        raise ValueError(
            f"drafters.{name}.family: must be one of {', '.join(_PREDICTED)} to be predicted, "
            f"not {drafter.family}"
        )
    cost = cost_of(drafter, profile.cores)
    if drafter.family == SYNTHETIC and drafter.cost is None:
        return
    if cost not in profile.costs.drafting:
        if drafter.cost is not None:
            known = ", ".join(sorted(profile.costs.drafting))
            raise ValueError(
                f"drafters.{name}.cost: must be one of {known} of the cost table, not {cost!r}"
            )
        raise ValueError(
            f"drafters.{name}.threads: the profile has no {cost}; make it with --draft-threads"
        )


def threads_of(target: Target, cores: list[int]) -> int:
    """Return the number of threads of the target's forwards."""
    return target.threads or len(_cores(target.cores, cores))


def cost_of(drafter: Drafter, cores: list[int]) -> str:
    """Return the name under which the profile's `drafting` has the drafter's costs."""
    if drafter.cost is not None:
        return drafter.cost
    if drafter.family != "model":
        return drafter.family
    # In the verifier's process, a drafter computes on one thread.
    threads = 1 if drafter.in_process else len(_cores(drafter.cores, cores))
    return way_of("model", drafter.threads or threads)


def _cores(text: str | None, all_cores: list[int]) -> list[int]:
    return all_cores if text is None else parse_cores(text)


def scenario_of(
    experiment: Experiment,
    way: str,
    profile: Profile,
    recording: list[RecordedRequest],
    warm_up: int,
) -> Scenario:
    """Return the scenario of a decoding mode in a cell.

    `recording` has the clients' requests; the first `warm_up` of them are not counted.
    """
    target = experiment.target
    workload = experiment.workload
    drafters: list[tuple[str, Drafter]] = []
    if way != PLAIN:
        drafters = list(drafters_of(experiment))
    served = _served({drafter.family for _, drafter in drafters})
    serving = profile.serving_at(served, workload.batch)
    settings = {
        name: target.settings[name] for name in _VERIFIER_SETTINGS if name in target.settings
    }
    given: dict[str, Any] = {
        "name": experiment.name,
        "costs": _costs(experiment, [drafter for _, drafter in drafters], profile, served),
        "recording": recording,
        "warm_up": warm_up,
        "seconds": _LONGEST_S,
        "sequences": [workload.batch],
        "client_ms": 1000 * serving.client_s,
        # 64 is the verifier's default; a run has no prefix cache by default.
        "max_sequences": 64,
        "prefix_caching": False,
        **settings,
        "drafters": [
            spec
            for name, drafter in drafters
            for spec in _specs(experiment, name, drafter, profile)
        ],
    }
    return Scenario.model_validate(given)


def _served(families: set[str]) -> str:
    """Return the name that the profile has for serving with drafters of these families."""
    for family in ("model", "ngram"):
        if family in {_served_as(each) for each in families}:
            return family
    return "plain"


def _served_as(family: str) -> str:
    """Return the family whose measured costs of serving are used for this family.

    Synthetic guesses cost the same as n-grams.
    """
    return "ngram" if family == SYNTHETIC else family


def _costs(experiment: Experiment, drafters: list[Drafter], profile: Profile, served: str) -> Costs:
    """Return the profile's cost table for a machine that serves in the decoding mode `served`."""
    beside = any(not _elsewhere(experiment, drafter, profile) for drafter in drafters)
    found = profile.costs_at(served, beside=beside)
    made = {
        f"{SYNTHETIC} {name}": DraftingCost(
            round_s=0.0, token_s={1: float(drafter.settings.get("token_ms", 0.0)) / 1000}
        )
        for name, drafter in drafters_of(experiment)
        if drafter.family == SYNTHETIC
    }
    return found.model_copy(update={"drafting": found.drafting | made})


def _specs(
    experiment: Experiment, name: str, drafter: Drafter, profile: Profile
) -> Iterator[dict[str, Any]]:
    """Yield the scenario's fields of a simulated drafter, for each process of the drafter."""
    link = experiment.links[drafter.link] if drafter.link is not None else None
    common = {
        "family": drafter.family,
        "cost": cost_of(drafter, profile.cores),
        "drafts_by": _DRAFTS_BY.get(drafter.family, drafter.family),
        **_placed(experiment, drafter, profile),
        **_linked(experiment, drafter, link, profile),
        **{key: value for key, value in drafter.settings.items() if key in _SETTINGS},
    }
    if drafter.family == SYNTHETIC:
        rates = str(drafter.settings.get("acceptance", 0.8)).split(",")
        common |= {"acceptance": [float(rate) for rate in rates]}
        common |= {} if drafter.cost is not None else {"cost": f"{SYNTHETIC} {name}"}
    for own in simulated_processes(name, drafter):
        yield {**common, "name": own, "process": own}


def _elsewhere(experiment: Experiment, drafter: Drafter, profile: Profile) -> bool:
    """True if a drafter is on another host or a GPU, or only on the target's cores."""
    return (
        drafter.host is not None
        or drafter.device != "cpu"
        or _on_target_cores(experiment, drafter, profile)
    )


def _on_target_cores(experiment: Experiment, drafter: Drafter, profile: Profile) -> bool:
    """Return whether a drafter has only cores that the target's forwards fill."""
    own = set(_cores(experiment.target.cores, profile.cores))
    return profile.threads >= len(own) and set(_cores(drafter.cores, profile.cores)) <= own


def _placed(experiment: Experiment, drafter: Drafter, profile: Profile) -> dict[str, Any]:
    """Return the effects of a drafter's place on its own speed and on the target's.

    If the drafter is on other cores of the host, its effect on forwards is in the cost table.
    """
    if drafter.host is not None:
        return {"slowness": 1.0}
    serving = profile.serving_at(_served_as(drafter.family), experiment.workload.batch)
    placed: dict[str, Any] = {
        "on_target_device": _target_device(experiment, drafter, profile).is_shared(
            Placement(
                host=platform.node(),
                device=drafter.device,
                cores=tuple(_cores(drafter.cores, profile.cores)),
                gpu_uuid=_gpu(drafter),
            )
        ),
        "slowness": serving.slowness,
    }
    if not _gpu(drafter) and _on_target_cores(experiment, drafter, profile):
        placed |= {"interference": 1.0, "slowness": SLOWNESS_ON_TARGET_CORES}
    return placed


def _gpu(drafter: Drafter) -> str:
    """Return the name of the drafter's GPU; empty on a CPU.

    Predictions assume that the target computes on this GPU too.
    """
    return "" if drafter.device == "cpu" else drafter.device


def _target_device(experiment: Experiment, drafter: Drafter, profile: Profile) -> TargetDevice:
    """Return the device where the verifier computes, as the verifier tells its engine."""
    own = frozenset(_cores(experiment.target.cores, profile.cores))
    if gpu := _gpu(drafter):
        return TargetDevice(gpu_uuids=frozenset([gpu]))
    return TargetDevice(own if profile.threads >= len(own) else frozenset())


def _linked(
    experiment: Experiment, drafter: Drafter, link: Link | None, profile: Profile
) -> dict[str, Any]:
    """Return the network between drafter and verifier; inside the verifier's process there is none.

    The calibration load went over TCP. A Unix socket, or the process of a link, differs from it by
    too little to measure.
    """
    if drafter.in_process:
        return {"in_process": True, "round_trip_ms": 0.0}
    serving = profile.serving_at(_served_as(drafter.family), experiment.workload.batch)
    found = Link.model_validate({}) if link is None else link
    return {
        **found.model_dump(),
        "round_trip_ms": found.round_trip_ms + 1000 * serving.round_trip_s,
        "jitter_ms": found.jitter_ms + 1000 * serving.jitter_s,
    }


def simulated_processes(name: str, drafter: Drafter) -> list[str]:
    """Return the names of a drafter's simulated processes."""
    return [f"{name}-{number}" for number in range(1, drafter.count + 1)]
