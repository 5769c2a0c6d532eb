"""Judges by the clock whether speculation is a loss, and rations what such a loss may cost.

Drafters that compute on the target's cores, or take its memory bandwidth, slow down plain steps as
well, so no cost of a forward shows that they do harm. This module compares whole steps: those with
drafters at work against *quiet* ones, during which no drafter computes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from verifier_svc.policy.forward_cost import ForwardCost
from verifier_svc.state.drafter import Drafter

# A budget is counted in quiet plain steps. It begins with so many where drafters are asked, and
# where they are only probed.
_FIRST_STEPS, _PROBE_STEPS = 6.0, 2.0
# Share of the time that refills budgets which are used up.
_REFILL = 0.005
# A budget holds more as its drafters gain: this share of what they gain, up to so many steps in
# all. Else one run of bad luck would end what pays.
_SAVED, _MOST_STEPS = 0.125, 32.0
# Steps that a budget which was used up must have again before drafting may be tried anew. Few, so that
# speed is soon back when a link or a drafter recovers: a trial that fails loses no more than these.
_REOPEN_STEPS = 1.5
# A step that was held up says little, so none loses more than this.
_WORST_STEP = 2.0
# Quiet steps that are measured in a row. They come again after `_FIRST_GAP` steps, then after twice
# as many, up to `_LONGEST_GAP`: contexts grow, and other work comes and goes.
_QUIET_STEPS = 4
_FIRST_GAP, _LONGEST_GAP = 128, 1024
# Steps after which a row of quiet steps is given up, since some drafter is never done.
_LONGEST_ROW = 128
# Least weight of a quiet step in the mean.
_QUIET_WEIGHT = 1 / 32


@dataclass(slots=True)
class _Budget:
    """Quiet steps that one way of drafting may still lose."""

    steps: float
    most: float
    open: bool = True
    """Whether drafting may go on. A budget that is used up opens again at `_REOPEN_STEPS`."""

    def add(self, steps: float) -> None:
        """Note steps that were gained, or lost if below 0."""
        self.steps += steps
        if self.steps > self.most:
            self.most = min(self.most + _SAVED * (self.steps - self.most), _MOST_STEPS)
            self.steps = self.most
        if self.steps < 0.0:
            self.open = False
            self.most = min(self.most, _FIRST_STEPS)
        elif self.steps >= min(_REOPEN_STEPS, self.most):
            self.open = True


@dataclass(slots=True)
class _Quiet:
    """Quiet steps of batches of about one size, and when to measure more of them."""

    slowdown: float = 0.0
    """Time of a quiet step over that of its forward before the first request: a running mean."""
    count: int = 0
    due: int = _QUIET_STEPS
    """How many to measure now."""
    passed: int = 0
    """Steps since some became due, or since the last one that was."""
    gap: int = _FIRST_GAP

    def measure(self, slowdown: float) -> None:
        """Note a quiet step."""
        self.count += 1
        weight = max(1.0 / self.count, _QUIET_WEIGHT)
        self.slowdown += weight * (
            min(slowdown, _WORST_STEP * (self.slowdown or slowdown)) - self.slowdown
        )
        if self.due:
            self.due -= 1
            self.passed = 0

    def tick(self) -> None:
        """A step passed."""
        self.passed += 1
        if self.due and self.passed >= _LONGEST_ROW:
            self.due = self.passed = 0
        elif not self.due and self.passed >= self.gap:
            self.due, self.passed, self.gap = _QUIET_STEPS, 0, min(2 * self.gap, _LONGEST_GAP)


class SpeculationBudget:
    """For one engine. Without trial forwards in `isolated` it judges nothing and allows all.

    Each way of drafting (the set of drafters that are asked) has a budget for batches of about one
    size, which gains refill and losses drain: the cumulative sum of Page (Continuous inspection
    schemes, 1954). So however wrong all estimates are, speculation loses no more than budgets begin
    with, a share of what it gained before, and the share `_REFILL` of the time.
    """

    def __init__(self, isolated: ForwardCost) -> None:
        self._isolated = isolated
        self._quiet: dict[int, _Quiet] = {}
        self._budgets: dict[frozenset[Drafter], dict[int, _Budget]] = {}

    def needs_quiet(self, batch: int) -> bool:
        """Whether nobody should be asked now, so that quiet steps can be measured."""
        quiet = self._quiet.get(_about(batch))
        return quiet.due > 0 if quiet is not None else self._isolated.known

    def allows(self, batch: int, way: frozenset[Drafter]) -> bool:
        """Whether this way of drafting did not lose too much."""
        budget = self._nearest(_about(batch), way)
        return budget is None or budget.open

    def observe(
        self, batch: int, way: frozenset[Drafter], token_count: int, seconds: float, *, quiet: bool
    ) -> None:
        """Note a step without prompts of `batch` sequences that committed `token_count` tokens.

        It took `seconds` from the end of the step before it. It is `quiet` if it verified no drafts
        and no drafter computed.
        """
        decode_step_s = self._isolated.estimate(batch, batch)
        if decode_step_s == 0.0:
            return
        size = _about(batch)
        known = self._quiet.setdefault(size, _Quiet())
        if quiet:
            known.measure(seconds / decode_step_s)
        known.tick()
        if known.count == 0:
            return
        steps = seconds / (decode_step_s * known.slowdown)
        if not quiet:
            self._budget(size, way).add(max(token_count / batch - steps, -_WORST_STEP))
        self._refill(size, min(steps, _WORST_STEP))

    def forget(self, drafter: Drafter) -> None:
        """A drafter left."""
        self._budgets = {way: sizes for way, sizes in self._budgets.items() if drafter not in way}

    def _refill(self, size: int, steps: float) -> None:
        """Share out what so many steps refill among the budgets that are used up."""
        budgets = [sizes[size] for sizes in self._budgets.values() if size in sizes]
        closed = [budget for budget in budgets if not budget.open]
        for budget in closed:
            budget.add(_REFILL * steps / len(closed))

    def _nearest(self, size: int, way: frozenset[Drafter]) -> _Budget | None:
        """The budget of batches of this size, or else of the size nearest to it."""
        sizes = self._budgets.get(way)
        if not sizes:
            return None
        return sizes.get(size) or sizes[min(sizes, key=lambda other: abs(other - size))]

    def _budget(self, size: int, way: frozenset[Drafter]) -> _Budget:
        """The budget of this size; a new one begins as the nearest one stands."""
        sizes = self._budgets.setdefault(way, {})
        if size not in sizes:
            first = _FIRST_STEPS if way else _PROBE_STEPS
            sizes[size] = replace(self._nearest(size, way) or _Budget(first, first))
        return sizes[size]


def _about(batch: int) -> int:
    """The power of two that is nearest on a scale of ratios: log2(batch), rounded."""
    return ((2 * batch * batch).bit_length() - 1) // 2
