"""The places among which `outrider lab advise` chooses, with their costs."""

from __future__ import annotations

from dataclasses import replace

from outrider_bench.experiment.advice import Place, Situation
from outrider_bench.experiment.profile_record import Profile
from outrider_bench.experiment.serving import SLOWNESS_ON_TARGET_CORES
from outrider_bench.intervals import MOST_OF_ALLOWED, of_allowed
from outrider_bench.settings import MAX_ACCEPTANCE, Question

_ELSEWHERE = " elsewhere"


def situations_of(question: Question, profile: Profile) -> list[Situation]:
    """The situation of each batch; raises ValueError that names the setting."""
    drafting = profile.costs.drafting
    for name in ("drafter", "cpu_drafter"):
        way = getattr(question, name)
        if way is not None and way not in drafting:
            known = ", ".join(sorted(drafting)) or "(none)"
            flag = name.replace("_", "-")
            raise ValueError(f"{flag}: must be one of {known} of the cost table, not {way!r}")
    return [
        _as_measured(profile, _family(question), situation_of(question, profile, batch))
        for batch in dict.fromkeys(question.batch)
    ]


def _family(question: Question) -> str:
    """Serving is measured with one thread for each family, whatever place the drafter takes."""
    return question.drafter.partition("-")[0]


def _as_measured(profile: Profile, way: str, situation: Situation) -> Situation:
    """The situation with what the profile's own load says about it; a cost table has none."""
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


def situation_of(question: Question, profile: Profile, batch: int) -> Situation:
    """The situation of a batch by these costs, without what a profile's own load says about it."""
    family = _family(question)
    acceptance = question.acceptance
    if acceptance is None:
        acceptance = profile.acceptance.get(family)
    if acceptance is None:
        raise ValueError(f"acceptance: give --acceptance, from 0 to {MAX_ACCEPTANCE}")
    costs = profile.costs_at(family, batch)
    # Messages of a drafter on another machine cost the target's machine nothing.
    elsewhere = {
        name + _ELSEWHERE: cost.model_copy(update={"message_s": 0.0})
        for name, cost in costs.drafting.items()
    }
    costs = costs.model_copy(update={"drafting": costs.drafting | elsewhere})
    places = _places(question, profile, batch)
    plain_costs = profile.costs_at("plain", batch)
    return Situation(plain_costs, costs, places, min(acceptance, MAX_ACCEPTANCE), batch)


def _places(question: Question, profile: Profile, batch: int) -> tuple[Place, Place, Place]:
    serving = profile.serving_at(_family(question), batch)
    cpu_drafter = question.cpu_drafter or question.drafter
    host = Place(
        "host",
        "on other cores of the host",
        cpu_drafter,
        1000 * serving.round_trip_s,
        1000 * serving.jitter_s,
        interference=serving.interference,
        slowness=serving.slowness,
    )
    own = replace(
        host,
        key="target",
        name="on the target's cores or GPU",
        cost=question.drafter,
        on_target_cores=True,
        interference=0.0,
        slowness=SLOWNESS_ON_TARGET_CORES if profile.is_measured else 1.0,
    )
    far = replace(
        host,
        key="far",
        name=f"on another host, {question.round_trip_ms:g} ms away",
        cost=cpu_drafter + _ELSEWHERE,
        round_trip_ms=host.round_trip_ms + question.round_trip_ms,
        interference=0.0,
        slowness=1.0,
    )
    return own, host, far
