"""Puts advice into words and tables of one screen, or into a JSON object. Computes nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from outrider_bench.experiment.advice import Arithmetic, BatchAdvice, Simulated
from outrider_bench.experiment.arithmetic import MAX_ROUND_TRIP_S, Estimate
from outrider_bench.experiment.profile_record import Profile
from outrider_bench.experiment.situation import Place, Situation

_DIFFERS = 0.10
_SEEN = 0.05
_VERDICTS = {True: "yes", False: "no", None: "no verdict"}
_TIE = 0.01
_DRAFTERS = {"model": "a draft model", "ngram": "an n-gram drafter"}


def answer(drafter: str, advice: Sequence[BatchAdvice]) -> str:
    """The first line: whether the other host is the best place, at which batches, and how much.

    There is no verdict where the simulation and the arithmetic contradict each other.
    """
    first = advice[0]
    situation = first.situation
    far = first.situation.far
    here = max(first.simulated[place.key].speed for place in situation.places[:2])
    verdicts: dict[str, list[int]] = {}
    for found in advice:
        verdicts.setdefault(_VERDICTS[found.pays_to_move], []).append(found.batch)
    word = ", ".join(f"{word} at batch {_listed(verdicts[word])}" for word in verdicts)
    if len(verdicts) == 1:
        [word] = verdicts
    word = word[0].upper() + word[1:]
    name = _DRAFTERS.get(drafter.partition("-")[0], f"the drafter {drafter}")
    speed = first.simulated[far.key].speed
    batch = first.batch
    return (
        f"{word}: {name} {situation.link_ms:g} ms away brings {speed:.2f} × plain decoding "
        f"at batch {batch} ({here:.2f} × on this host)."
    )


def doubts(advice: Sequence[BatchAdvice], profile: Profile | None) -> list[str]:
    """Why to doubt the answer: contradictions, and the load under which a profile was measured."""
    lines = [
        f"No verdict at batch {found.batch}: drafting there pays up to a round trip of "
        f"{_round_trip(found)} by simulation, and {_arithmetic_round_trip(found)} by arithmetic."
        for found in advice
        if found.pays_to_move is None
    ]
    if profile is not None and profile.conditions is not None:
        lines.append(f"The profile was measured {profile.conditions.described(profile.cores)}.")
    return lines


def show(
    console: Console, drafter: str, advice: Sequence[BatchAdvice], profile: Profile | None = None
) -> None:
    """Print the answer and doubts, the table of placements, and the first batch's arithmetic."""
    for line in (answer(drafter, advice), *doubts(advice, profile)):
        console.print(line, markup=False, soft_wrap=True)
    console.print(_placements(advice))
    first = advice[0]
    situation = advice[0].situation
    far = situation.far
    shown = first.arithmetic[far.key]
    console.print(f"Arithmetic of a drafter {far.name}, at batch {first.batch}", style="bold")
    console.print(_symbols(situation, shown), markup=False, soft_wrap=True)
    console.print(_ways(shown, first.simulated[far.key]))
    console.print(_break_evens(shown), markup=False, soft_wrap=True)
    for line in _differences(advice):
        console.print(line, markup=False, soft_wrap=True)
    console.print(f"Costs: {_source(situation)}", markup=False, soft_wrap=True)


def as_json(
    drafter: str, advice: Sequence[BatchAdvice], profile: Profile | None = None
) -> dict[str, Any]:
    """Everything, in the units that names end with.

    A break-even is null where nothing pays, and a round trip also where all up to the limit pay.
    """
    return {
        "answer": answer(drafter, advice),
        "doubts": doubts(advice, profile),
        "drafter": drafter,
        "costs": advice[0].situation.costs.source,
        "batches": [_batch_json(found) for found in advice],
    }


def _batch_json(found: BatchAdvice) -> dict[str, Any]:
    situation = found.situation
    data = {
        "batch": found.batch,
        "acceptance": situation.acceptance,
        "hit_rate": situation.hit_rate,
        "places": [asdict(place) for place in situation.places],
        "plain_tokens_per_s": found.plain_tokens_per_s,
        "simulated": {key: asdict(simulated) for key, simulated in found.simulated.items()},
        "arithmetic": {key: asdict(shown) for key, shown in found.arithmetic.items()},
        "best": found.best,
        "pays_to_move": found.pays_to_move,
        "break_even_round_trip_ms": found.break_even_round_trip_ms,
        "pays_at_any_round_trip": found.break_even_round_trip_ms == math.inf,
        "break_even_acceptance": found.break_even_acceptance,
        "halved": found.halved,
        "limit": found.limit,
        "differences": {
            place.key: {"share": share, "reason": _reason(place, found)}
            for place in situation.places
            if (share := difference(place, found)) is not None
        },
    }
    return {key: finite(value) for key, value in data.items()}


def difference(place: Place, found: BatchAdvice) -> float | None:
    """How far the simulation is above the arithmetic, as a share; None if within 10 %."""
    share = found.simulated[place.key].speed / found.arithmetic[place.key].expected.speed - 1.0
    if abs(share) > _DIFFERS:
        return share
    return None


def _reason(place: Place, found: BatchAdvice) -> str:
    expected = found.arithmetic[place.key].expected
    simulated = found.simulated[place.key]
    if simulated.speed > expected.speed:
        return "the rest of a late draft is used, and some drafts run ahead of the verdict"
    if place.on_target_cores:
        return "drafting overlaps forwards and makes them longer; in the arithmetic they take turns"
    if simulated.undrafted_share > expected.undrafted_share + _SEEN:
        return "more steps have no draft, since the engine decodes plainly rather than wait for one"
    return "the engine learns acceptance and prices as it runs; sequences keep no common pace"


def _source(situation: Situation) -> str:
    """The first sentence of the costs' source; sources and assumptions follow it."""
    return situation.costs.source.partition(". ")[0]


def _differences(advice: Sequence[BatchAdvice]) -> list[str]:
    """A line for each place and reason."""
    grouped: dict[tuple[str, str], list[str]] = {}
    for place in advice[0].situation.places:
        for found in advice:
            share = difference(place, found)
            if share is not None:
                word = f"{100 * share:+.0f} % at batch {found.batch}"
                grouped.setdefault((place.name, _reason(place, found)), []).append(word)
    if not grouped:
        return []
    return [
        "The simulation differs from the arithmetic by more than 10 %:",
        *[f"  {name}: {', '.join(words)}: {why}." for (name, why), words in grouped.items()],
    ]


def _placements(advice: Sequence[BatchAdvice]) -> Table:
    situation = advice[0].situation
    table = Table(
        title=f"× plain decoding, simulated, at acceptance {situation.acceptance:.2f} (◀ best)",
        title_justify="left",
    )
    table.add_column("the drafter runs")
    for found in advice:
        table.add_column(f"batch {found.batch}", justify="right")
    for place in situation.places:
        table.add_row(place.name, *[_speed(place, found) for found in advice])
    table.add_section()
    table.add_row("break-even round trip, other host", *[_round_trip(found) for found in advice])
    lowest = [_share(found.break_even_acceptance) for found in advice]
    table.add_row("break-even acceptance, other host", *lowest)
    table.add_row("limited by (speed with half of it)", *[_limit(found) for found in advice])
    plain = [f"{found.plain_tokens_per_s:.1f}" for found in advice]
    table.add_row("plain decoding, tokens/s", *plain)
    return table


def _symbols(situation: Situation, shown: Arithmetic) -> str:
    times = shown.times
    depth = shown.expected.depth
    return (
        f"a = {situation.acceptance:.2f} acceptance   p = {_ms(times.decode_step_s)} plain step   "
        f"v = {_ms(times.verify_s[depth])} verifying step, k = {depth}   "
        f"c = {_ms(times.draft_token_s)} a draft token   "
        f"c₀ = {_ms(times.draft_round_s)} a drafting round\n"
        f"r = {_ms(times.round_trip_s)} round trip, {situation.near.round_trip_ms:.3g} ms of it as "
        "on this host   d = c₀ + k·c   "
        "E = (1 − a^(k+1)) / (1 − a) tokens a round (Leviathan et al. 2023, eq. 1)"
    )


_FORMULAS = {
    "synchronous hop": "v + d + r",
    "late draft, no waiting": "m·p + v for m + 1 steps, m = ⌈(d + r) / p⌉",
    "chain that runs ahead": "h·max(v, d + r) + (1 − h)·(v + d + r), h = a^(k+1)",
    "pushed outcomes, a bound": "h·max(v, d + r) + (1 − h)·(v + d + r), h = {hit_rate:.2f}",
}


def _ways(shown: Arithmetic, simulated: Simulated) -> Table:
    table = Table()
    for name in ("way", "time of a step"):
        table.add_column(name)
    for name in ("best k", "tokens a step", "ms a step", "× plain"):
        table.add_column(name, justify="right")
    for estimate in shown.ways:
        formula = _FORMULAS[estimate.way].format(hit_rate=estimate.hit_rate)
        table.add_row(estimate.way, formula, *_figures(str(estimate.depth), estimate))
    table.add_section()
    figures = _figures(f"{simulated.depth:.1f}", simulated)
    table.add_row("simulation", "engine, planner and drafter in virtual time", *figures)
    return table


def _figures(depth: str, found: Estimate | Simulated) -> list[str]:
    return [depth, f"{found.tokens:.2f}", f"{1000 * found.step_s:.2f}", f"{found.speed:.2f}"]


def _break_evens(shown: Arithmetic) -> str:
    longest = "at no round trip"
    if shown.break_even_round_trip_s is not None:
        longest = f"up to r = {_ms(min(shown.break_even_round_trip_s, MAX_ROUND_TRIP_S))}"
    lowest = "at no acceptance"
    if shown.break_even_acceptance is not None:
        lowest = f"from acceptance {shown.break_even_acceptance:.2f} on"
    return f"By arithmetic the better of the first two pays {longest}, and {lowest} at this r."


def _round_trip(found: BatchAdvice) -> str:
    value = found.break_even_round_trip_ms
    if value is None:
        return "none pays"
    if value == math.inf:
        return "over 1000 ms"
    return f"{value:.3g} ms"


def _arithmetic_round_trip(found: BatchAdvice) -> str:
    """The arithmetic's break-even of the link alone, as `_round_trip` shows the simulated one."""
    total_s = found.arithmetic[found.situation.far.key].break_even_round_trip_s
    if total_s is None:
        return "none pays"
    link_ms = 1000 * min(total_s, MAX_ROUND_TRIP_S) - found.situation.near.round_trip_ms
    return f"{link_ms:.3g} ms"


def _limit(found: BatchAdvice) -> str:
    return f"{found.limit} ({found.halved[found.limit]:.2f})"


def _share(value: float | None) -> str:
    if value is None:
        return "none pays"
    return f"{value:.2f}"


def _speed(place: Place, found: BatchAdvice) -> str:
    """The speed, with a mark on the best and on those within 1 % of it."""
    speed = found.simulated[place.key].speed
    if found.best is None or speed < (1 - _TIE) * found.simulated[found.best].speed:
        return f"{speed:.2f}  "
    return f"[bold]{speed:.2f} ◀[/bold]"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"


def _listed(numbers: Sequence[int]) -> str:
    *others, last = map(str, numbers)
    if not others:
        return last
    return f"{', '.join(others)} and {last}"


def finite(value: Any) -> Any:
    """The value with None for infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if value == math.inf:
        return None
    return value
