"""The places among which `outrider lab advise` chooses, with their costs."""

from __future__ import annotations

from dataclasses import replace

from outrider_bench.commands.advise import MAX_ACCEPTANCE, Question
from outrider_bench.experiment import machine_costs
from outrider_bench.experiment.advice import Place, Situation
from outrider_bench.experiment.machine_costs import MachineCosts, at_batch, elsewhere
from outrider_bench.simulator.costs import Costs


def situations_of(question: Question) -> list[Situation]:
    """The situation of each batch; raises ValueError that names the setting."""
    found = machine_costs.load(question.costs)
    table = found if isinstance(found, Costs) else found.costs
    for name in ("drafter", "cpu_drafter"):
        way = getattr(question, name)
        if way is not None and way not in table.drafting:
            known = ", ".join(sorted(table.drafting)) or "(none)"
            flag = name.replace("_", "-")
            raise ValueError(f"{flag}: must be one of {known} of the cost table, not {way!r}")
    batches = dict.fromkeys(question.batch)
    return [_situation(question, b, at_batch(found, question.drafter, b)) for b in batches]


def _situation(question: Question, batch: int, costs: MachineCosts) -> Situation:
    acceptance = question.acceptance
    if acceptance is None:
        acceptance = costs.acceptance
    if acceptance is None:
        raise ValueError(f"acceptance: give --acceptance, from 0 to {MAX_ACCEPTANCE}")
    places = _places(question, costs)
    acceptance = min(acceptance, MAX_ACCEPTANCE)
    return Situation(costs.plain, costs.drafted, places, acceptance, batch)


def _places(question: Question, costs: MachineCosts) -> tuple[Place, Place, Place]:
    cpu_drafter = question.cpu_drafter or question.drafter
    host = Place(
        "host",
        "on other cores of the host",
        cpu_drafter,
        costs.round_trip_ms,
        costs.jitter_ms,
        interference=costs.interference,
        slowness=costs.slowness,
    )
    own = replace(
        host,
        key="target",
        name="on the target's cores or GPU",
        cost=question.drafter,
        on_target_cores=True,
        interference=0.0,
        slowness=costs.slowness_on_target_cores,
    )
    far = replace(
        host,
        key="far",
        name=f"on another host, {question.round_trip_ms:g} ms away",
        cost=elsewhere(costs.drafted, cpu_drafter),
        round_trip_ms=host.round_trip_ms + question.round_trip_ms,
        interference=0.0,
        slowness=1.0,
    )
    return own, host, far
