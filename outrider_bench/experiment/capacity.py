"""How many clients a verifier serves at an equal rate, by the place of its drafters.

A remote drafter costs the verifier's machine nothing but messages. So even where it makes no single
stream faster than a drafter here, the machine may serve more clients with it (arXiv 2606.25091).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from rich.table import Table

from outrider_bench.console import table_of
from outrider_bench.experiment.advice import Place, Simulator, Situation
from outrider_bench.sample import Sample

MOST = 256
"""Most clients that are tried, as in a batch of `outrider lab advise`."""
NO_DRAFTER = "no drafter"


@dataclass(frozen=True, slots=True)
class Capacity:
    """The most clients that get the rate, with drafters at one place."""

    place: str
    """The place in words."""
    clients: int
    """0 if a single one does not get it, `MOST` if that many do."""
    draft_tokens: float = 0.0
    """Mean draft tokens of the steps that verified any, with that many clients."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What each client gets: `tokens_per_s`, in at least this `share` of the requests."""

    tokens_per_s: float
    share: float = 0.95

    def holds(self, sample: Sample) -> bool:
        """Whether enough requests of a simulation got the rate."""
        return bool(1.0 / np.quantile(sample.tpot, self.share) >= self.tokens_per_s)


def capacities(
    situation_of: Callable[[int], Situation],
    wanted: Wanted,
    remote_count: int = 1,
    tell: Callable[[], None] = lambda: None,
) -> list[Capacity]:
    """The capacity without a drafter, and with drafters at each place; takes minutes.

    `situation_of` makes the situation of so many clients. `remote_count` drafters share the
    sequences on the other host. Calls `tell` after each place.
    """
    keys = [None, *(place.key for place in situation_of(1).places)]
    found = []
    for key in keys:
        found.append(_capacity(situation_of, key, wanted, remote_count))
        tell()
    return found


def answer(found: Sequence[Capacity], wanted: Wanted) -> str:
    """The place that serves the most clients, in a sentence."""
    plain = found[0].clients
    best = max(found, key=lambda each: each.clients)
    rate = f"{wanted.tokens_per_s:g} tokens/s each"
    if best.clients == 0:
        return f"No client gets {rate}."
    if best.clients <= plain:
        return f"No drafter serves more clients at {rate}: {plain} without one."
    return f"{best.clients} clients get {rate} with the drafter {best.place}, {plain} without one."


def table(found: Sequence[Capacity], wanted: Wanted) -> Table:
    """The clients by place, and over those without a drafter."""
    plain = found[0].clients
    title = (
        f"clients that get {wanted.tokens_per_s:g} tokens/s each in {100 * wanted.share:g} % of "
        "the requests, simulated"
    )
    shown = table_of(title, ("the drafter runs", "clients", "× no drafter", "draft tokens"))
    for each in found:
        count = f"{each.clients} or more" if each.clients == MOST else str(each.clients)
        ratio = f"{each.clients / plain:.2f}" if plain else "–"
        shown.add_row(each.place, count, ratio, f"{each.draft_tokens:.1f}")
    return shown


def _capacity(
    situation_of: Callable[[int], Situation], key: str | None, wanted: Wanted, remote_count: int
) -> Capacity:
    """The capacity with the drafter at the place `key`, or without one."""
    name = NO_DRAFTER
    depths = {0: 0.0}

    def holds(clients: int) -> bool:
        nonlocal name
        situation = situation_of(clients)
        place: Place | None = None
        if key is not None:
            [place] = [place for place in situation.places if place.key == key]
            name = place.name
            if place is situation.far:
                place = replace(place, count=remote_count)
        sample = Simulator(situation).sample(place, situation.acceptance)
        counters = sample.counters
        drafts = counters.get("spec_decode_num_drafts", 0.0)
        drafted = counters.get("spec_decode_num_draft_tokens", 0.0)
        depths[clients] = drafted / max(drafts, 1.0)
        return wanted.holds(sample)

    clients = most_that_holds(holds, MOST)
    return Capacity(name, clients, depths[clients])


def most_that_holds(holds: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` for which a condition holds that fails beyond it.

    To within a 32nd of the number; 0 if 1 fails.
    """
    low, high = 0, 1
    while high <= most and holds(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > max(1, low // 32):
        middle = (low + high) // 2
        if holds(middle):
            low = middle
        else:
            high = middle
    return low
