"""Drafters and links that go bad and come back, each by itself, as Markov chains of two states."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from outrider_bench.fleet.spec import Fleet

Bools = NDArray[np.bool_]


class Faults:
    """The states of all draft processes and of their links; they begin in their steady state."""

    def __init__(self, fleet: Fleet, count: int, random: np.random.Generator) -> None:
        drafters = fleet.drafters
        links = fleet.links
        step_s = fleet.days.step_s
        down_share = drafters.mean_down_s / (drafters.mean_up_s + drafters.mean_down_s)
        self._random = random
        self._fails = step_s / drafters.mean_up_s
        self._returns = step_s / max(drafters.mean_down_s, step_s)
        self._heals = step_s / max(links.mean_bad_s, step_s)
        self._spoils = self._heals * links.bad_share / (1.0 - links.bad_share)
        self.up: Bools = random.random(count) >= down_share
        self.bad: Bools = random.random(count) < links.bad_share
        """Whether a process' link is bad."""

    def step(self) -> Bools:
        """Go one time step on; returns which processes went down."""
        up_draw, link_draw = self._random.random((2, len(self.up)))
        before = self.up
        self.up = np.where(before, up_draw >= self._fails, up_draw < self._returns)
        self.bad = np.where(self.bad, link_draw >= self._heals, link_draw < self._spoils)
        went: Bools = before & ~self.up
        return went
