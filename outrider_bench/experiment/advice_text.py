"""Puts advice into words and a table, or into a JSON object. Computes nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from outrider_bench.console import table_of
from outrider_bench.experiment.advice import BatchAdvice, Place
from outrider_bench.experiment.profile_record import Profile

# Speeds that differ by less are equal.
_TIE = 1.01
_DRAFTERS = {"model": "a draft model", "ngram": "an n-gram drafter"}


def answer(drafter: str, advice: Sequence[BatchAdvice]) -> str:
    """The first line: whether the other host is the best place, at which batches, and how much."""
    first = advice[0]
    situation = first.situation
    here = max(first.simulated[place.key].speed for place in situation.places[:2])
    verdicts: dict[str, list[str]] = {}
    for found in advice:
        verdicts.setdefault(found.verdict, []).append(str(found.batch))
    word = ", ".join(f"{word} at batch {' and '.join(verdicts[word])}" for word in verdicts)
    if len(verdicts) == 1:
        [word] = verdicts
    name = _DRAFTERS.get(drafter.partition("-")[0], f"the drafter {drafter}")
    speed = first.simulated[situation.far.key].speed
    return (
        f"{word.capitalize()}: {name} {situation.link_ms:g} ms away brings {speed:.2f} × plain "
        f"decoding at batch {first.batch} ({here:.2f} × on this host).{_why_not(advice)}"
    )


def _why_not(advice: Sequence[BatchAdvice]) -> str:
    """Why there is no verdict at some batch; "" if there is one at all of them."""
    untold = [found for found in advice if found.verdict == "cannot tell"]
    if not untold:
        return ""
    doubts = [found.doubt for found in untold if found.doubt]
    if doubts:
        return f" The profile contradicts itself: {doubts[0]}."
    spread = untold[0].situation.spread
    return f" Equal computations differed by {spread:.2f} × while the costs were measured."


def show(console: Console, drafter: str, advice: Sequence[BatchAdvice], profile: Profile) -> None:
    """Print the answer, the table of placements, and the source of the costs."""
    console.print(answer(drafter, advice), markup=False, soft_wrap=True)
    console.print(_placements(advice))
    console.print(f"Costs: {profile.described}", markup=False, soft_wrap=True)


def as_json(drafter: str, advice: Sequence[BatchAdvice], profile: Profile) -> dict[str, Any]:
    """Everything, in the units that names end with.

    A break-even is null where nothing pays, and a round trip also where all up to the limit pay.
    """
    return {
        "answer": answer(drafter, advice),
        "source": f"Costs: {profile.described}",
        "drafter": drafter,
        "costs": profile.costs.source,
        "batches": [_batch_json(found) for found in advice],
    }


def _batch_json(found: BatchAdvice) -> dict[str, Any]:
    situation = found.situation
    always = found.break_even_round_trip_ms == math.inf
    return {
        "batch": found.batch,
        "acceptance": situation.acceptance,
        "places": [asdict(place) for place in situation.places],
        "plain_tokens_per_s": found.plain_tokens_per_s,
        "simulated": {key: asdict(simulated) for key, simulated in found.simulated.items()},
        "best": found.best,
        "verdict": found.verdict,
        "spread": situation.spread,
        "doubt": found.doubt,
        # JSON has no infinity.
        "break_even_round_trip_ms": None if always else found.break_even_round_trip_ms,
        "pays_at_any_round_trip": always,
        "break_even_acceptance": found.break_even_acceptance,
        "halved": found.halved,
        "limit": found.limit,
    }


def _placements(advice: Sequence[BatchAdvice]) -> Table:
    situation = advice[0].situation
    title = f"× plain decoding, simulated, at acceptance {situation.acceptance:.2f} (◀ best)"
    table = table_of(title, ("the drafter runs", *(f"batch {found.batch}" for found in advice)))
    table.title_justify = "left"
    for place in situation.places:
        table.add_row(place.name, *[_speed(place, found) for found in advice])
    table.add_section()

    def known(words: Callable[[BatchAdvice], str]) -> list[str]:
        # Break-evens and limits follow from the speeds, which are unknown at these batches.
        return ["?" if found.verdict == "cannot tell" else words(found) for found in advice]

    table.add_row("break-even round trip, other host", *known(_round_trip))
    lowest = known(lambda found: _share(found.break_even_acceptance))
    table.add_row("break-even acceptance, other host", *lowest)
    limits = known(lambda found: f"{found.limit} ({found.halved[found.limit]:.2f})")
    table.add_row("limited by (speed if that were half as bad)", *limits)
    plain = [f"{found.plain_tokens_per_s:.1f}" for found in advice]
    table.add_row("plain decoding, tokens/s", *plain)
    return table


def _round_trip(found: BatchAdvice) -> str:
    value = found.break_even_round_trip_ms
    if value is None:
        return "none pays"
    return "over 1000 ms" if value == math.inf else f"{value:.3g} ms"


def _share(value: float | None) -> str:
    return "none pays" if value is None else f"{value:.2f}"


def _speed(place: Place, found: BatchAdvice) -> str:
    """The speed, with a mark on the best and on those that are not shown to be slower."""
    speed = found.simulated[place.key].speed
    tie = max(_TIE, found.situation.spread)
    if found.best is None or tie * speed < found.simulated[found.best].speed:
        return f"{speed:.2f}  "
    return f"[bold]{speed:.2f} ◀[/bold]"
