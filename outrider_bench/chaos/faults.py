"""The faults of a campaign, keyed by name, with effects, durations and permitted outcomes.

Each fault has one coroutine, which starts it and ends it. The campaign then waits until the stack
has recovered.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from outrider_bench.chaos.clients import Clients
from outrider_bench.chaos.observe import address_space
from outrider_bench.chaos.parts import (
    ALL_VERIFIERS,
    DRAFTERS,
    GATEWAYS,
    VERIFIERS,
    touched,
)
from outrider_bench.chaos.site import Site
from outrider_bench.experiment.links import Direction
from outrider_bench.experiment.spec import Link


@dataclass(frozen=True, slots=True)
class Scene:
    """The site and the clients that a fault can act on."""

    site: Site
    clients: Clients


Play = Callable[[Scene, str, float], Awaitable[None]]
"""Plays a fault at a target for some seconds, and undoes it."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One kind of fault."""

    play: Play
    targets: tuple[str, ...]
    """Processes, links, `ALL_VERIFIERS`, or "clients". A round plays the fault at one of them."""
    allows: frozenset[str] = frozenset()
    """Outcomes other than "finished" that requests under way during the fault may have."""
    seconds: tuple[float, float] = (1.0, 4.0)


async def _kill(scene: Scene, target: str, seconds: float) -> None:
    await scene.site.down(touched(target), seconds, kill=True)


async def _restart(scene: Scene, target: str, seconds: float) -> None:
    await scene.site.down(touched(target), seconds, kill=False)


async def _freeze(scene: Scene, target: str, seconds: float) -> None:
    await scene.site.freeze(touched(target), seconds)


async def _stutter(scene: Scene, target: str, seconds: float) -> None:
    """Stop the process for half of each 0.2 s."""
    for _ in range(round(seconds / 0.2)):
        await _freeze(scene, target, 0.1)
        await asyncio.sleep(0.1)


async def _no_files(scene: Scene, target: str, seconds: float) -> None:
    """Keep the process from opening more files and sockets; open ones stay."""
    await scene.site.limit(target, resource.RLIMIT_NOFILE, 3, seconds)


async def _no_memory(scene: Scene, target: str, seconds: float) -> None:
    """Keep the process from getting more address space.

    The process may end, as if killed for memory.
    """
    used = address_space(scene.site.pid(target))
    await scene.site.limit(target, resource.RLIMIT_AS, used, seconds)
    await scene.site.start_again_if_ended(target)


def _outage(direction: Direction) -> Play:
    async def play(scene: Scene, target: str, seconds: float) -> None:
        await scene.site.links[target].outage(seconds, direction)
        await asyncio.sleep(seconds)

    return play


def _shaped(**shape: float) -> Play:
    async def play(scene: Scene, target: str, seconds: float) -> None:
        control = scene.site.links[target]
        await control.shape(Link.model_validate(shape))
        await asyncio.sleep(seconds)
        await control.shape(Link.model_validate({}))

    return play


async def _reset(scene: Scene, target: str, seconds: float) -> None:
    await scene.site.links[target].reset()
    await asyncio.sleep(seconds)


async def _vanish(scene: Scene, target: str, seconds: float) -> None:
    await scene.site.links[target].vanish()
    await asyncio.sleep(seconds)


def _redis(during: dict[str, str], after: dict[str, str]) -> Play:
    async def play(scene: Scene, target: str, seconds: float) -> None:
        async with scene.site.redis() as client:
            for name, value in during.items():
                await client.config_set(name, value)
            await asyncio.sleep(seconds)
            for name, value in after.items():
                await client.config_set(name, value)

    return play


async def _cannot_save(scene: Scene, target: str, seconds: float) -> None:
    """Make Redis's saves fail as on a full disk, so that it refuses writes."""
    async with scene.site.redis() as client:
        await client.config_set("save", "1 1")
        await scene.site.limit(target, resource.RLIMIT_FSIZE, 0, seconds)
        await client.config_set("save", "")


async def _flush(scene: Scene, target: str, seconds: float) -> None:
    async with scene.site.redis() as client:
        await client.flushall()


def _hostile(way: str) -> Play:
    async def play(scene: Scene, target: str, seconds: float) -> None:
        await scene.site.attack(way, seconds)

    return play


async def _leave(scene: Scene, target: str, seconds: float) -> None:
    await scene.clients.crowd(16, leaves_after=5)


async def _read_slowly(scene: Scene, target: str, seconds: float) -> None:
    await scene.clients.crowd(4, pause_s=seconds / 100)


async def _crowd(scene: Scene, target: str, seconds: float) -> None:
    await scene.clients.crowd(64)


async def _say_half(scene: Scene, target: str, seconds: float) -> None:
    await scene.clients.half_requests(100, seconds)


# If a gateway dies, no process can send its clients an error. A gateway that is stopping, or out of
# file descriptors, may refuse requests. All other faults must cost no request: another verifier
# continues the request, and drafters change no output.
_ANY_END = frozenset({"failed", "refused", "cut"})
_NAMED_END = frozenset({"failed", "refused"})
_NOTICED_S = (13.0, 16.0)
"""Bounds of the seconds of a fault that lasts until a silent process's peers notice the silence.

They notice it by their pings, which takes up to 12 s.
"""
_DRAFTERS = tuple(DRAFTERS)
_LARGE = {"maxmemory": "0", "maxmemory-policy": "noeviction"}
_WAYS = (
    *("lies", "floods", "hangs", "never reads", "ids out of range", "false distributions"),
    *("repeats itself", "garbage", "comes and goes"),
)


def _of_processes() -> dict[str, Fault]:
    """Return faults of verifiers, gateways and drafters."""
    found: dict[str, Fault] = {}
    for name, targets in {"verifier": VERIFIERS, "gateway": GATEWAYS, "drafter": _DRAFTERS}.items():
        any_end = _ANY_END if name == "gateway" else frozenset()
        named_end = any_end & _NAMED_END
        found[f"{name} killed"] = Fault(_kill, targets, any_end)
        found[f"{name} restarted"] = Fault(_restart, targets, named_end)
        found[f"{name} frozen"] = Fault(_freeze, targets)
        found[f"{name} stutters"] = Fault(_stutter, targets)
        found[f"{name} without files"] = Fault(_no_files, targets, named_end)
        found[f"{name} without memory"] = Fault(_no_memory, targets, any_end)
    found["verifier frozen for long"] = Fault(_freeze, VERIFIERS, seconds=_NOTICED_S)
    found["all verifiers killed"] = Fault(_kill, (ALL_VERIFIERS,))
    found["all verifiers restarted"] = Fault(_restart, (ALL_VERIFIERS,))
    found["all verifiers frozen"] = Fault(_freeze, (ALL_VERIFIERS,))
    return found


def _of_links() -> dict[str, Fault]:
    """Return faults of the links from gateways and drafters to verifiers, and of Redis's link."""
    kinds: dict[str, Play] = {
        "down": _outage("both"),
        "down one way": _outage("up"),
        "down the other way": _outage("down"),
        "slow": _shaped(round_trip_ms=200, jitter_ms=50),
        "trickles": _shaped(mbit_s=0.05),
        "lossy": _shaped(loss=0.05),
        "reset": _reset,
    }
    found: dict[str, Fault] = {}
    for name, targets in {"gateway": ("link-1", "link-2"), "drafter": _DRAFTERS}.items():
        links = targets if name == "gateway" else tuple(f"link-{target}" for target in targets)
        found |= {f"{name} link {kind}": Fault(play, links) for kind, play in kinds.items()}
        found[f"{name} link half open"] = Fault(_vanish, links, seconds=_NOTICED_S)
    for kind in ("down", "slow", "trickles", "reset"):
        found[f"redis link {kind}"] = Fault(kinds[kind], ("link-redis",))
    return found


def _of_redis() -> dict[str, Fault]:
    """Return faults of the Redis that n-gram and suffix drafters share."""
    plays: dict[str, Play] = {
        "redis killed": _kill,
        "redis restarted": _restart,
        "redis frozen": _freeze,
        "redis flushed": _flush,
        "redis cannot save": _cannot_save,
        "redis full": _redis({"maxmemory": "1mb"}, _LARGE),
        "redis evicts": _redis({"maxmemory": "1mb", "maxmemory-policy": "allkeys-random"}, _LARGE),
    }
    return {name: Fault(play, ("redis",)) for name, play in plays.items()}


def _of_strangers() -> dict[str, Fault]:
    """Return faults of hostile drafters, and of clients."""
    found = {
        f"hostile drafter: {way}": Fault(_hostile(way), ("hostile",), seconds=(2.0, 5.0))
        for way in _WAYS
    }
    clients: dict[str, Play] = {
        "clients leave": _leave,
        "clients read slowly": _read_slowly,
        "clients crowd": _crowd,
        "clients say half a request": _say_half,
    }
    return found | {name: Fault(play, ("clients",)) for name, play in clients.items()}


FAULTS: dict[str, Fault] = _of_processes() | _of_links() | _of_redis() | _of_strangers()
"""All faults, keyed by name."""


def bag_of(kinds: Sequence[str], missing: frozenset[str]) -> list[str]:
    """Return the names of the faults that each turn plays: `kinds`, or all if `kinds` is empty.

    Faults whose targets are all in `missing`, the parts that the stack lacks, are left out. Raises
    ValueError if a fault does not exist, or if none is left.
    """
    if unknown := set(kinds) - set(FAULTS):
        known = ", ".join(FAULTS)
        raise ValueError(f"kind: there is no fault {min(unknown)!r}; the faults are {known}")
    chosen = [n for n in kinds or FAULTS if not missing.issuperset(FAULTS[n].targets)]
    if not chosen:
        parts = ", ".join(sorted(missing))
        raise ValueError(f"kind: all of these faults need what the stack lacks: {parts}")
    return chosen
