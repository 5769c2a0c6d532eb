"""Plays the rounds of a campaign: traffic, one or two faults, recovery, and quiet.

The faults of a round are a pure function of the seed and the round's number.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from redis.exceptions import RedisError

from outrider_bench.chaos.clients import Clients
from outrider_bench.chaos.faults import FAULTS, Scene
from outrider_bench.chaos.history import History
from outrider_bench.chaos.parts import absent, touched, unreachable
from outrider_bench.chaos.site import running_site
from outrider_bench.experiment.processes import StackFailed

_AT_ONCE = 8
# The number of streams in progress while faults are played.
_CLIENTS = 16
# The probability that a round draws a second fault.
_OVERLAP = 0.5
Tell = Callable[[str], None]


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
    """Plan one or two faults for one round.

    The faults hit different processes or links, none of them `absent`.

    A turn is `len(bag)` rounds. In each turn, every fault of the bag is the first fault of one
    round; the order of these faults is random.
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


@dataclass(frozen=True, slots=True)
class Campaign:
    """The settings of a campaign: new rounds, drawn from `seed`, start until `minutes` are over.

    If `only` is given, the campaign plays the round with this number, and no other. With `tls`,
    all processes use mutual TLS, and clients HTTPS.
    """

    minutes: float
    seed: int
    only: int | None = None
    tls: bool = False


async def play(campaign: Campaign, bag: Sequence[str], history: History, tell: Tell) -> None:
    """Play rounds with the faults of a bag.

    Raises StackFailed if the stack does not start, if a request fails before the first fault, or
    if the stack does not recover from a fault.
    """
    missing = absent()
    async with (
        running_site(missing, tls=campaign.tls) as site,
        aclosing(Clients(site.gateways, site.trust, history)) as clients,
    ):
        await clients.ask_all(_AT_ONCE)
        if any(event["outcome"] != "finished" for event in history.events):
            raise StackFailed("requests fail without any fault; the history has them")
        until = time.monotonic() + 60 * campaign.minutes
        only = campaign.only
        for number in itertools.count() if only is None else [only]:
            if time.monotonic() > until:
                break
            planned = round_of(campaign.seed, number, bag, _OVERLAP, missing)
            history.round = number
            left = "" if only is not None else f", {(until - time.monotonic()) / 60:.1f} min left"
            tell(f"round {number}{left}: {', '.join(map(_text, planned))}")
            await _round(Scene(site, clients), planned, history)


def _text(planned: Planned) -> str:
    return f"{planned.fault} ({planned.target}, {planned.seconds:g} s)"


async def _round(scene: Scene, planned: list[Planned], history: History) -> None:
    """Play one round's faults under traffic, then record resources in use and processes' sizes."""
    over = asyncio.Event()
    async with asyncio.TaskGroup() as traffic:
        for _ in range(_CLIENTS):
            traffic.create_task(scene.clients.stream_until(over))
        try:
            async with asyncio.TaskGroup() as faults:
                for one in planned:
                    faults.create_task(_fault(scene, one, history))
        finally:
            over.set()
    for detail in await scene.site.revive():
        history.add("trouble", detail=detail)
    if missing := await scene.site.recovered():
        detail = f"the stack did not recover: {missing}"
        history.add("trouble", detail=detail)
        raise StackFailed(detail)
    history.add("quiet", **await scene.site.quiet())


async def _fault(scene: Scene, planned: Planned, history: History) -> None:
    """Play one fault, wait for at most 90 s until the stack is complete, and record the fault."""
    await asyncio.sleep(planned.after_s)
    fault = FAULTS[planned.fault]
    began = history.now()
    try:
        await fault.play(scene, planned.target, planned.seconds)
    except (OSError, RedisError, StackFailed) as error:
        history.add("trouble", detail=f"{planned.fault} could not be played: {error}")
    await scene.site.recovered()
    history.add(
        "fault",
        name=planned.fault,
        target=planned.target,
        began=began,
        allows=sorted(fault.allows),
        unreachable=unreachable(planned.target),
    )
