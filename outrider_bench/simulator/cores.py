"""Cores that the processes of a simulated host share: each computes more slowly beside others.

The cores are shared equally, as by a fair scheduler without overhead: k threads on c cores run at
min(1, c / k) each.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from outrider_bench.simulator.costs import Costs
from outrider_bench.simulator.events import Events

_Place = tuple[frozenset[int], int]
"""The cores that a process may use, and its number of threads."""


@dataclass(eq=False, slots=True)
class Worker:
    """A process that does one piece of work at a time. Without `cores` nothing slows it down."""

    events: Events
    cores: Cores | None = None
    allowed: frozenset[int] = frozenset()
    """The cores that it may use."""
    threads: int = 1
    is_target: bool = False
    owed_s: float = 0.0
    """Work that later work of others took from a piece whose end was already an event."""

    def spend(self, seconds: float) -> None:
        """Make the present event take as long as `seconds` of work."""
        [self.events.now] = self.ends(self.events.now, [seconds])

    def ends(self, begins: float, parts: list[float]) -> list[float]:
        """When the parts of a piece of work end that begins at `begins`.

        `parts` are the seconds from the beginning to their ends if nothing slows the work down.
        """
        if self.cores is None or not parts or parts[-1] <= 0.0:
            return [begins + part for part in parts]
        times = (self.cores.run(self, begins, parts[-1]) - begins) / parts[-1]
        return [begins + times * part for part in parts]


@dataclass(frozen=True, slots=True)
class _Piece:
    worker: Worker
    begins: float
    ends: float


class Cores:
    """The pieces of work in progress, and the times at which new ones end.

    The end of a piece is an event, so work that begins later cannot move it. The time that this
    work takes from the piece lengthens the next piece of the same worker. So no work is lost, but a
    slow-down comes up to one piece late.
    """

    def __init__(self, events: Events, costs: Costs) -> None:
        self._events = events
        self._costs = costs
        self._pieces: list[_Piece] = []

    def run(self, worker: Worker, begins: float, seconds: float) -> float:
        """Begin `seconds` of work at `begins`; returns when it ends."""
        # No event begins before the present one began, so no work does.
        self._pieces = [piece for piece in self._pieces if piece.ends > self._events.began]
        others = [piece for piece in self._pieces if piece.ends > begins]
        bounds = sorted({time for piece in others for time in (piece.begins, piece.ends)})
        now = begins
        left = seconds + worker.owed_s
        worker.owed_s = 0.0
        for bound in [*(bound for bound in bounds if bound > begins), float("inf")]:
            beside = [piece.worker for piece in others if piece.begins <= now < piece.ends]
            *slowed, rate = self._rates([*beside, worker])
            until = min(bound, now + left / rate)
            for other, before, after in zip(beside, self._rates(beside), slowed, strict=True):
                other.owed_s += (until - now) * max(before - after, 0.0)
            left = max(left - (until - now) * rate, 0.0)
            now = until
            if now < bound:
                break
        self._pieces.append(_Piece(worker, begins, now))
        return now

    def _rates(self, workers: list[Worker]) -> list[float]:
        """The speed of each of these workers while all of them compute; 1 is that of one alone."""
        shares = equal_shares(tuple([(worker.allowed, worker.threads) for worker in workers]))
        # Forwards that wait for a core slow no others down.
        forwards = sum(
            [share for worker, share in zip(workers, shares, strict=True) if worker.is_target]
        )
        slower = self._costs.beside_forwards(forwards)
        return [
            share / slower if worker.is_target else share
            for worker, share in zip(workers, shares, strict=True)
        ]


@cache
def equal_shares(places: tuple[_Place, ...]) -> tuple[float, ...]:
    """The share of a core that each thread of the processes at `places` gets, at most 1.

    Max-min fair: the most crowded set of cores divides itself equally among those that have no
    others, and so on with the rest (Bertsekas and Gallager, Data Networks, section 6.5.2). Sets are
    those of the processes and the union of all, which is exact if each contains or excludes others.
    """
    sets = {allowed for allowed, _ in places}
    sets.add(frozenset().union(*sets))
    found: dict[int, float] = {}
    while len(found) < len(places):
        share, crowd = min([_crowded(cores, places, found) for cores in sets], key=lambda s: s[0])
        if share >= 1.0:
            share, crowd = 1.0, [i for i in range(len(places)) if i not in found]
        found.update(dict.fromkeys(crowd, share))
    return tuple([found[i] for i in range(len(places))])


def _crowded(
    cores: frozenset[int], places: tuple[_Place, ...], found: dict[int, float]
) -> tuple[float, list[int]]:
    """The share of a thread on these cores, and the processes that have no others and no share."""
    left = float(len(cores))
    threads = 0
    crowd: list[int] = []
    for i, (allowed, count) in enumerate(places):
        if not allowed <= cores:
            continue
        if i in found:
            left -= count * found[i]
        else:
            threads += count
            crowd.append(i)
    return (left / threads if crowd else float("inf")), crowd
