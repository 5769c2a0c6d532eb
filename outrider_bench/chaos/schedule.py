"""The faults of each round: a pure function of the seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from outrider_bench.chaos.faults import FAULTS
from outrider_bench.chaos.parts import touched


@dataclass(frozen=True, slots=True)
class Planned:
    """A fault of a round."""

    fault: str
    target: str
    after_s: float
    """Seconds after the round's traffic began."""
    seconds: float


def round_of(
    seed: int,
    number: int,
    bag: Sequence[str],
    overlap: float,
    absent: frozenset[str] = frozenset(),
) -> list[Planned]:
    """The faults of one round, one or two that touch different processes or links, none absent.

    The first faults of `len(bag)` rounds are all those of the bag, in an order of their own.
    """
    turn, place = divmod(number, len(bag))
    order = list(bag)
    random.Random(f"{seed} {turn}").shuffle(order)
    draw = random.Random(f"{seed} {turn} {place}")
    planned = [_plan(order[place], draw, absent)]
    if draw.random() < overlap:
        second = _plan(draw.choice(order), draw, absent)
        if touched(second.target).isdisjoint(touched(planned[0].target)):
            planned.append(second)
    return planned


def _plan(name: str, draw: random.Random, absent: frozenset[str]) -> Planned:
    fault = FAULTS[name]
    target = draw.choice([target for target in fault.targets if target not in absent])
    after_s = round(draw.uniform(0.1, 1.5), 2)
    return Planned(name, target, after_s, round(draw.uniform(*fault.seconds), 2))
