"""Runs many simulated worlds, and finds the smallest part of a world that still fails."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from outrider_bench.console import progress
from outrider_bench.simulator.worlds.plan import WorldPlan, draw_world
from outrider_bench.simulator.worlds.play import play

MESSAGES = ("draft messages", "verdict messages", "chunks")
"""The names of the counts of messages that arrived."""
_MOST_FAILURES = 5


@dataclass(slots=True)
class Campaign:
    """The counts of the simulated worlds of some seeds, and the seeds that failed."""

    counts: Counter[str] = field(default_factory=Counter)
    failures: dict[int, str] = field(default_factory=dict)
    """Maps a failed world's seed to the reason."""
    cpu_s: float = 0.0

    @property
    def message_count(self) -> int:
        """The number of all messages that arrived."""
        return sum(self.counts[name] for name in MESSAGES)


def failure_of(plan: WorldPlan) -> tuple[str, Counter[str]]:
    """Run a simulated world; return why it failed (empty if it did not), and its counts."""
    try:
        return "", play(plan).counts
    # Any error that the code under test raises is a finding.
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}", Counter()


def run_campaign(seeds: Iterable[int]) -> Campaign:
    """Run the simulated worlds of the seeds; stop when five worlds have failed."""
    campaign = Campaign()
    began = time.process_time()
    with _quiet_log():
        for seed in seeds:
            failure, counts = failure_of(draw_world(seed))
            campaign.counts += counts
            if failure:
                campaign.failures[seed] = failure
                if len(campaign.failures) >= _MOST_FAILURES:
                    break
    campaign.cpu_s = time.process_time() - began
    return campaign


def shrink(plan: WorldPlan) -> WorldPlan:
    """Remove faults, drafters and requests one by one while the world fails in the same way."""
    with _quiet_log():
        wanted = _kind(failure_of(plan)[0])
        smaller = bool(wanted)
        while smaller:
            smaller = False
            for candidate in _smaller(plan):
                if _kind(failure_of(candidate)[0]) == wanted:
                    plan = candidate
                    smaller = True
                    break
    return plan


def _kind(failure: str) -> str:
    """Return the type of an error or, for a Violation, the invariant.

    In `failure`, details follow after a colon.
    """
    parts = failure.split(":")
    return parts[1] if parts[0] == "Violation" else parts[0]


def _smaller(plan: WorldPlan) -> Iterator[WorldPlan]:
    """Yield plans that each lack one part of `plan`; at least one request remains."""
    for i in range(len(plan.faults)):
        yield replace(plan, faults=plan.faults[:i] + plan.faults[i + 1 :])
    for i in range(len(plan.drafters)):
        yield replace(plan, drafters=plan.drafters[:i] + plan.drafters[i + 1 :])
    for i in range(len(plan.requests)):
        if len(plan.requests) > 1:
            yield replace(plan, requests=plan.requests[:i] + plan.requests[i + 1 :])


@contextmanager
def _quiet_log() -> Iterator[None]:
    """Log nothing: forwards and strategies fail as planned, and hostile drafters are refused."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def show_campaign(first: int, count: int) -> int:
    """Run `count` worlds of the seeds from `first` on; print results and return the exit status."""
    with progress() as bar:
        campaign = run_campaign(bar.track(range(first, first + count), description="worlds"))
    rate = campaign.message_count / max(campaign.cpu_s, 1e-9)
    for name, value in sorted(campaign.counts.items()):
        print(f"{value:>14,}  {name}")
    print(f"{campaign.message_count:>14,}  messages, {rate:,.0f} in each second of CPU time")
    for seed, failure in campaign.failures.items():
        print(f"seed {seed} fails: {failure}")
        print(f"  play it again: outrider lab simulate --faults 1 --seed {seed}")
    for seed in [*campaign.failures][:1]:
        _show_plan(shrink(draw_world(seed)))
    return min(len(campaign.failures), 1)


def _show_plan(plan: WorldPlan) -> None:
    """Print the smallest part of a world that still fails."""
    print(f"this much of seed {plan.seed} is enough: {failure_of(plan)[0]}")
    for part in (plan.engine, *plan.drafters, *plan.requests, *plan.faults):
        print(f"  {part}")
