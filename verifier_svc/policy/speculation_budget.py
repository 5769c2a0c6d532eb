"""Measures whether speculation is a loss, and limits how much such a loss may cost.

Drafters that compute on the target's cores, or take its memory bandwidth, slow down plain steps as
well, so the costs of forwards do not show the harm. This module therefore compares whole steps. In
a *baseline* step no drafter computes; the module compares the duration of other steps with the
duration of baseline steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from verifier_svc.policy.forward_cost import ForwardCost
from verifier_svc.state.drafter import Drafter

# Budgets are counted in baseline steps. A new budget has `_FIRST_STEPS` if drafters are asked, and
# `_PROBE_STEPS` if they are only probed.
_FIRST_STEPS = 6.0
_PROBE_STEPS = 2.0
# Exhausted budgets together regain this share of the time that passes.
_REFILL = 0.005
# The capacity of a full budget grows by this share of further gains, up to `_MOST_STEPS`. With a
# small capacity, one run of bad luck would stop a drafter set that pays.
_SAVED = 0.125
_MOST_STEPS = 32.0
# An exhausted budget opens again when it has this many steps. The number is small, so that drafting
# soon goes on when a link or a drafter recovers. A trial that fails loses these steps, and at most
# the loss of one step more.
_REOPEN_STEPS = 1.5
# No step counts as a loss of more than this many baseline steps, since a step may be slow for a
# reason outside the engine.
_WORST_STEP = 2.0
# A series of baseline steps has `_BASELINE_STEPS` steps. The next series follows after `_FIRST_GAP`
# steps, and each further gap is twice as long, up to `_LONGEST_GAP`. Series repeat because contexts
# grow, and other load comes and goes.
_BASELINE_STEPS = 4
_FIRST_GAP = 128
_LONGEST_GAP = 1024
# A series of baseline steps is abandoned if its next baseline step has not come after this many
# steps, since some drafter then computes all the time.
_LONGEST_ROW = 128
# Least weight of a baseline step in the mean.
_BASELINE_WEIGHT = 1 / 32
# Load has grown if the mean of `_LOAD_STEPS` consecutive baseline steps exceeds `_GROWN` times the
# mean before them.
_LOAD_STEPS = 16
_GROWN = 1.25
# A reset halves a budget's capacity and fills the budget, unless half the capacity is less than
# `_LEAST_STEPS`. Because of this limit, a load that comes and goes does not cancel a loss again and
# again.
_LEAST_STEPS = 1.0


@dataclass(slots=True)
class _Budget:
    """The number of baseline steps that a drafter set may still lose."""

    steps: float
    most: float
    """The capacity: the maximum of `steps`."""
    open: bool = True
    """True if drafting may go on. An exhausted budget opens again at `_REOPEN_STEPS`."""

    def add(self, steps: float) -> None:
        """Add a number of gained steps; a negative number stands for lost steps."""
        self.steps += steps
        if self.steps > self.most:
            self.most = min(self.most + _SAVED * (self.steps - self.most), _MOST_STEPS)
            self.steps = self.most
        if self.steps < 0.0:
            self.open = False
            self.most = min(self.most, _FIRST_STEPS)
        elif self.steps >= min(_REOPEN_STEPS, self.most):
            self.open = True

    def reset(self) -> None:
        """Halve the capacity of an exhausted budget and refill the budget.

        No effect if half the capacity is below `_LEAST_STEPS`.
        """
        half = self.most / 2.0
        if not self.open and half >= _LEAST_STEPS:
            self.most = half
            self.add(half - self.steps)


@dataclass(slots=True)
class _Baseline:
    """The baseline steps of batches of about one size, and when to measure more of them."""

    slowdown: float = 0.0
    """Running mean of a baseline step's time, divided by the time of its isolated forward."""
    count: int = 0
    """Baseline steps that were measured."""
    due: int = _BASELINE_STEPS
    """The number of baseline steps to measure now."""
    passed: int = 0
    """Steps since baseline steps became due, or since the last due baseline step was measured."""
    gap: int = _FIRST_GAP
    """Steps until baseline steps become due again."""
    recent: float = 0.0
    """Like `slowdown`, for the last `recent_count` steps, all of them baseline steps."""
    recent_count: int = 0
    before: float = 0.0
    """`slowdown` before the recent steps."""

    def measure(self, slowdown: float) -> bool:
        """Add a baseline step that took `slowdown` times its isolated forward.

        Returns True if the load has grown. In that case only the recent steps count from now on.
        """
        if self.recent_count == 0:
            self.before = self.slowdown or slowdown
        self.count += 1
        weight = max(1.0 / self.count, _BASELINE_WEIGHT)
        self.slowdown += weight * (_bounded(slowdown, self.slowdown) - self.slowdown)
        self.recent_count += 1
        bounded = _bounded(slowdown, self.recent or self.before)
        self.recent += (bounded - self.recent) / self.recent_count
        if self.due:
            self.due -= 1
            self.passed = 0
        if self.recent_count < _LOAD_STEPS:
            return False
        grown = self.recent > _GROWN * self.before
        if grown:
            self.slowdown = self.recent
        self.interrupt()
        return grown

    def interrupt(self) -> None:
        """Forget the recent baseline steps, after enough of them or after another kind of step."""
        self.recent, self.recent_count = 0.0, 0

    def tick(self) -> None:
        """Count a step of any kind."""
        self.passed += 1
        if self.due and self.passed >= _LONGEST_ROW:
            self.due = self.passed = 0
        elif not self.due and self.passed >= self.gap:
            self.due = _BASELINE_STEPS
            self.passed = 0
            self.gap = min(2 * self.gap, _LONGEST_GAP)


class SpeculationBudget:
    """The budgets of one engine.

    A *drafter set* has the drafters that are asked; the empty set means only probes. Each set has
    one budget for all batches of about the same size. Gains refill a budget and losses drain it: it
    is the cumulative sum of Page (Continuous inspection schemes, 1954). However wrong all estimates
    are, speculation loses no more than its first budgets, a share of its earlier gains, and the
    share `_REFILL` of the time.

    Other processes slow down drafted and baseline steps alike. If baseline steps become slower, the
    budgets were judged by a reference that was too fast, and exhausted budgets are reset. All
    resets of a budget together allow no more loss than the first budget, unless gains fill the
    budget.
    """

    def __init__(self, isolated: ForwardCost) -> None:
        """`isolated` has the costs of the trial forwards before the first request.

        If there were none, nothing is measured and every drafter set is allowed.
        """
        self._isolated = isolated
        self._baselines: dict[int, _Baseline] = {}
        self._budgets: dict[frozenset[Drafter], dict[int, _Budget]] = {}

    def needs_baseline(self, batch: int) -> bool:
        """True if the next steps should ask no drafter, so that baseline steps can be measured."""
        baseline = self._baselines.get(_bucket(batch))
        return baseline.due > 0 if baseline is not None else self._isolated.known

    def allows(self, batch: int, drafters: frozenset[Drafter]) -> bool:
        """True if this drafter set has not exhausted its budget."""
        return self._allows(_bucket(batch), drafters)

    def observe(
        self,
        batch: int,
        drafters: frozenset[Drafter],
        token_count: int,
        seconds: float,
        *,
        baseline: bool,
    ) -> None:
        """Add a step without prompts that committed `token_count` tokens of `batch` sequences.

        `seconds` is the time since the previous step ended. The step is a `baseline` if it verified
        no drafts and no drafter computed.
        """
        decode_step_s = self._isolated.estimate(batch, batch)
        if decode_step_s == 0.0 or seconds == 0.0:
            return  # no forward was measured, or no time passed because the clock was set back
        size = _bucket(batch)
        known = self._baselines.setdefault(size, _Baseline())
        if not baseline:
            known.interrupt()
        elif known.measure(seconds / decode_step_s):
            self._reset(size)
        known.tick()
        if known.count == 0:
            return
        steps = seconds / (decode_step_s * known.slowdown)
        if not baseline:
            self._budget(size, drafters).add(max(token_count / batch - steps, -_WORST_STEP))
        self._refill(size, min(steps, _WORST_STEP))

    def forget(self, drafter: Drafter) -> None:
        """Drop the budgets of all sets with a drafter that has left."""
        self._budgets = {
            drafters: sizes for drafters, sizes in self._budgets.items() if drafter not in drafters
        }

    def _refill(self, size: int, steps: float) -> None:
        """Divide the refill of `steps` baseline steps among the exhausted budgets of this size.

        A drafter set without a budget for this size is judged by the budget of the nearest size. If
        that budget is exhausted, the set gets a budget of its own for this size, because the other
        budget is refilled only while batches have its size.
        """
        sets = [drafters for drafters in self._budgets if not self._allows(size, drafters)]
        closed = [self._budget(size, drafters) for drafters in sets]
        for budget in closed:
            budget.add(_REFILL * steps / len(closed))

    def _reset(self, size: int) -> None:
        """Reset the exhausted budgets of this size: the load may have caused their loss."""
        for sizes in self._budgets.values():
            if size in sizes:
                sizes[size].reset()

    def _allows(self, size: int, drafters: frozenset[Drafter]) -> bool:
        budget = self._nearest(size, drafters)
        return budget is None or budget.open

    def _nearest(self, size: int, drafters: frozenset[Drafter]) -> _Budget | None:
        """Return the budget for batches of this size, or of the nearest size that has a budget."""
        sizes = self._budgets.get(drafters)
        if not sizes:
            return None
        return sizes.get(size) or sizes[min(sizes, key=lambda other: abs(other - size))]

    def _budget(self, size: int, drafters: frozenset[Drafter]) -> _Budget:
        """Return the budget for this size. A new budget is a copy of the nearest size's budget."""
        sizes = self._budgets.setdefault(drafters, {})
        if size not in sizes:
            first = _FIRST_STEPS if drafters else _PROBE_STEPS
            sizes[size] = replace(self._nearest(size, drafters) or _Budget(first, first))
        return sizes[size]


def _bounded(slowdown: float, usual: float) -> float:
    """Return a step's slowdown, within a bound.

    A step that was slow for a reason outside the engine counts as at most `_WORST_STEP` usual
    steps.
    """
    return min(slowdown, _WORST_STEP * (usual or slowdown))


def _bucket(batch: int) -> int:
    """Return log2(batch), rounded, so that batches of about the same size share a budget."""
    return ((2 * batch * batch).bit_length() - 1) // 2
