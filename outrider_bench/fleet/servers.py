"""Verifiers as flow-equivalent servers: speeds of sequences, interpolated from measured rates.

A verifier's sequences share its engine steps, and each has a class: drafted over a good link, over
a bad one, or not drafted. Arrays have one entry a verifier, shape (V,), unless told otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider_bench.fleet.rates import QUANTILES, SLOWNESS, Cell, CellKey, batches, cell_id
from outrider_bench.fleet.spec import Drafters, Fleet
from outrider_bench.simulator import costs

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

GOOD, BAD, PLAIN = 0, 1, 2
CLASS_COUNT = 3
_LOG_SLOWNESS = np.log(SLOWNESS)


@dataclass(frozen=True, slots=True)
class Speeds:
    """Speeds of verifiers at their present loads. Times are in seconds."""

    token_s: Floats
    """Time per output token of a sequence, shape (V, classes)."""
    busy: Floats
    """Share of the time in which a drafter drafts for this verifier."""


class Servers:
    """Looks up speeds by the sequences that a verifier has and by how slow its drafters are."""

    def __init__(self, fleet: Fleet, known: dict[str, Cell]) -> None:
        """`known` has all cells that the fleet needs, as `rates.cells` returns them."""
        self._batches = np.array(batches(fleet), dtype=float)
        self._traffic = fleet.traffic
        table = [
            [self._row(fleet, known, kind, s) for s in SLOWNESS] for kind in range(CLASS_COUNT)
        ]
        shape = (CLASS_COUNT, len(SLOWNESS), len(self._batches))
        flat = [cell for rows in table for row in rows for cell in row]
        self._step_s = np.array([cell.step_s for cell in flat]).reshape(shape)
        self._token_s = np.array([cell.token_s for cell in flat]).reshape(shape)
        self._busy = np.array([cell.busy for cell in flat]).reshape(shape)
        self._ttft_s = np.array([cell.ttft_s for cell in flat]).reshape(*shape, -1)
        self._stretch = np.array([cell.stretch for cell in flat]).reshape(*shape, -1)
        drafting = costs.load(fleet.costs).drafting[fleet.drafters.cost]
        self._pass_counts = np.array(sorted(drafting.token_s), dtype=float)
        self._pass_s = np.array([drafting.token_s[int(count)] for count in self._pass_counts])

    @staticmethod
    def _row(fleet: Fleet, known: dict[str, Cell], kind: int, slowness: float) -> list[Cell]:
        found = []
        for batch in batches(fleet):
            key = CellKey(batch=batch)
            if kind == GOOD and fleet.drafters.count:
                round_trip_ms = fleet.links.round_trip_ms
                key = CellKey(batch=batch, round_trip_ms=round_trip_ms, slowness=slowness)
            elif kind == BAD and fleet.drafters.count:
                key = CellKey(batch=batch, round_trip_ms=fleet.links.bad_round_trip_ms)
            found.append(known[cell_id(fleet, key)])
        return found

    def slowness(self, loads: Floats, sequences: Floats, drafters: Drafters) -> Floats:
        """How slow a drafter is for a verifier, over one that has all of the verifier's sequences.

        `loads` are the verifier's sequences, `sequences` those of each drafter of its group. If a
        pass is for the sequences of all verifiers together, it takes as long as one for so many.
        If passes are in turn, one takes longer by the time in which the others keep the drafter
        busy, as with processor sharing, and at most by the number of verifiers.
        """
        alone = self._pass_time(loads)
        if drafters.shared_by == 1 or drafters.passes == "together":
            together: Floats = self._pass_time(np.maximum(sequences, 1.0)) / alone
            return together
        streams = np.clip(sequences, 1.0, drafters.shared_by)
        own: Floats = self._pass_time(np.maximum(sequences / streams, 1.0)) / alone
        busy = np.minimum(self._interpolate(self._busy[GOOD], loads, own) * streams, 1.0)
        others = busy * (1.0 - 1.0 / streams)
        waits: Floats = np.minimum(1.0 / np.maximum(1.0 - others, 1e-6), streams)
        return own * waits

    def _pass_time(self, counts: Floats) -> Floats:
        times = self._pass_s
        if not times.any():
            return np.ones_like(counts)
        found: Floats = np.interp(counts, self._pass_counts, times)
        if len(times) > 1:
            slope = (times[-1] - times[-2]) / (self._pass_counts[-1] - self._pass_counts[-2])
            found += np.maximum(counts - self._pass_counts[-1], 0.0) * slope
        return found

    def speeds(self, loads: Floats, shares: Floats, slowness: Floats) -> Speeds:
        """Speeds at these loads; `shares` of the classes have shape (V, classes) and sum to 1.

        A step of mixed sequences takes the mean of the classes' steps, and commits as many tokens
        of a sequence as a step of its class alone.
        """
        step_s = np.stack([self._interpolate(t, loads, slowness) for t in self._step_s], axis=1)
        token_s = np.stack([self._interpolate(t, loads, slowness) for t in self._token_s], axis=1)
        mixed_s = (shares * step_s).sum(axis=1, keepdims=True)
        busy = self._interpolate(self._busy[GOOD], loads, slowness)
        return Speeds(token_s * mixed_s / step_s, busy)

    def draw_ttft(self, loads: Floats, classes: Ints, luck: Floats, phase: Floats) -> Floats:
        """Times to first tokens for requests that come at these loads, `luck` being from 0 to 1.

        Where rates were measured, a request came when another one had ended, which is early in an
        engine step, and waited for the rest of that step. With Poisson arrivals it comes at any
        `phase` of the step, from 0 to 1.
        """
        found = self._draw(self._ttft_s, loads, classes, luck)
        if self._traffic.arrivals == "closed":
            return found
        client_s = self._traffic.client_ms / 1000
        middle = np.full_like(loads, 1.0)
        steps = [self._interpolate(table, loads, middle) for table in self._step_s]
        step_s = np.choose(classes, steps)
        waited_s = np.maximum(step_s - 3 * client_s, 0.0)
        return np.maximum(found - waited_s + phase * step_s, 2 * client_s)

    def draw_stretch(self, loads: Floats, classes: Ints, luck: Floats) -> Floats:
        """How many times the mean a request's tokens take, since texts are easy or hard."""
        return self._draw(self._stretch, loads, classes, luck)

    def _draw(self, table: Floats, loads: Floats, classes: Ints, luck: Floats) -> Floats:
        # The quantiles of cells whose drafter has all sequences of the verifier.
        middle = SLOWNESS.index(1.0)
        low, part = _place(self._batches, loads)
        i = np.minimum((luck * (len(QUANTILES) - 1)).astype(int), len(QUANTILES) - 2)
        rest = luck * (len(QUANTILES) - 1) - i
        at = np.arange(len(luck))
        found: Floats = np.zeros_like(luck)
        for column, weight in ((low, 1.0 - part), (low + 1, part)):
            rows = table[classes, middle, np.minimum(column, len(self._batches) - 1)]
            found += weight * (rows[at, i] * (1.0 - rest) + rows[at, i + 1] * rest)
        return found

    def _interpolate(self, table: Floats, loads: Floats, slowness: Floats) -> Floats:
        """Linear in the load and the logarithm of the slowness; flat outside the measurements."""
        column, x = _place(self._batches, loads)
        row, y = _place(_LOG_SLOWNESS, np.log(np.maximum(slowness, 1e-9)))
        right = np.minimum(column + 1, len(self._batches) - 1)
        below = np.minimum(row + 1, len(SLOWNESS) - 1)
        top = table[row, column] * (1.0 - x) + table[row, right] * x
        bottom = table[below, column] * (1.0 - x) + table[below, right] * x
        interpolated: Floats = top * (1.0 - y) + bottom * y
        return interpolated


def _place(points: Floats, values: Floats) -> tuple[Ints, Floats]:
    """Find the interval of rising points that holds each value, and the place in it, 0 to 1.

    A value outside all intervals lies at the nearest end.
    """
    if len(points) == 1:
        return np.zeros(len(values), dtype=np.int64), np.zeros(len(values))
    i = np.clip(np.searchsorted(points, values, side="right") - 1, 0, len(points) - 2)
    return i, np.clip((values - points[i]) / (points[i + 1] - points[i]), 0.0, 1.0)
