"""The places among which `outrider lab advise` chooses, with their costs."""

from __future__ import annotations

from dataclasses import replace

from outrider_bench.commands.advise import MAX_ACCEPTANCE, Question
from outrider_bench.experiment import machine_costs
from outrider_bench.experiment.advice import Place, Situation
from outrider_bench.experiment.machine_costs import MachineCosts, at_batch, elsewhere
from outrider_bench.experiment.profile_record import Profile
from outrider_bench.intervals import MOST_OF_ALLOWED, of_allowed
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
    situations = [situation_of(question, found, batch) for batch in dict.fromkeys(question.batch)]
    if isinstance(found, Costs):
        return situations
    way = question.drafter.partition("-")[0]
    return [_as_measured(found, way, situation) for situation in situations]


def situation_of(question: Question, found: Profile | Costs, batch: int) -> Situation:
    """The situation of a batch by these costs, without what a profile's own load says about it."""
    return _situation(question, batch, at_batch(found, question.drafter, batch))


def _as_measured(profile: Profile, way: str, situation: Situation) -> Situation:
    """The situation with what the profile's own load says about it."""
    ratios = {}
    doubt = ""
    plains = {served.batch: served for served in profile.served if served.way == "plain"}
    for served in profile.served:
        plain = plains.get(served.batch)
        if served.way != way or plain is None:
            continue
        ratio = ratios[served.batch] = served.tokens_per_s / plain.tokens_per_s
        allowed = served.tokens_per_sequence_step / plain.tokens_per_sequence_step
        if of_allowed(ratio, allowed) > MOST_OF_ALLOWED:
            doubt = (
                f"at batch {served.batch} its own load ran at {ratio:.2f} × plain decoding, and "
                f"its tokens per forward allow {allowed:.2f} ×"
            )
    spread = 1.0 if profile.conditions is None else profile.conditions.spread
    return replace(situation, spread=spread, measured=ratios.get(situation.batch), doubt=doubt)


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
