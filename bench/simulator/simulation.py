"""Runs one simulation from its beginning to its end and gathers its figures."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from prometheus_client.metrics_core import Metric

from bench.simulator import costs
from bench.simulator.drafter import DrafterActor
from bench.simulator.events import Events
from bench.simulator.scenario import DrafterSpec, Event, Scenario
from bench.simulator.traffic import Traffic
from bench.simulator.verifier import VerifierActor
from bench.simulator.world import World
from bench.ways import Sample, counter_key

# After the simulated time, cancelled requests get so long to end.
_DRAIN_S = 1000.0
# A drafter whose verifier is new finds it after so long.
_RECONNECT_S = 1.0


@dataclass(slots=True)
class Outcome:
    """The figures of one simulation. `drafters` has each one's counters by metric."""

    sample: Sample
    drafters: dict[str, dict[str, float]] = field(default_factory=dict)
    request_count: int = 0
    resubmitted_count: int = 0
    errors: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return {
            "tokens": self.sample.tokens,
            "seconds": self.sample.seconds,
            "requests": self.request_count,
            "resubmitted": self.resubmitted_count,
            "errors": self.errors,
            "drafters": self.drafters,
        }


class Simulation:
    """A scenario with so many requests under way. Without drafting its drafters never join."""

    def __init__(self, scenario: Scenario, load: int, *, drafting: bool = True) -> None:
        self.events = Events()
        self.world = World(scenario.seed, scenario.hard_share, scenario.stretch_tokens)
        self.verifiers: dict[str, VerifierActor] = {}
        self.gone: list[VerifierActor] = []
        self.drafters: dict[str, DrafterActor] = {}
        self._scenario = scenario
        self._costs = costs.load(scenario.costs)
        self._specs = {drafter.name: drafter for drafter in scenario.drafters} if drafting else {}
        for i in range(scenario.verifiers):
            self._start_verifier(f"verifier-{i + 1}")
        self.traffic = Traffic(self.events, scenario, load, self.world, self.verifiers, drafting)

    def run(self) -> Outcome:
        """Simulate; raises RuntimeError if pages or sequences are lost."""
        scenario, events = self._scenario, self.events
        for spec in self._specs.values():
            events.at(spec.joins_at, partial(self._join, spec))
        for event in scenario.schedule:
            events.at(event.at, partial(self._happen, event))
        self.traffic.begin()
        events.run(scenario.seconds)
        outcome = self._outcome()
        events.now = max(events.now, scenario.seconds)
        self.traffic.stop()
        for drafter in self.drafters.values():
            drafter.leave()
        events.run(scenario.seconds + _DRAIN_S)
        for verifier in self.verifiers.values():
            if verifier.serving:
                verifier.check_idle()
        return outcome

    # --- the schedule ---

    def _start_verifier(self, name: str) -> None:
        self.verifiers[name] = VerifierActor(self.events, name, self._scenario, self._costs, self.world)

    def _join(self, spec: DrafterSpec) -> None:
        verifier = self.verifiers[spec.verifier]
        if verifier.serving:
            self.drafters[spec.name] = DrafterActor(self.events, spec, self._costs, self.world, verifier)

    def _happen(self, event: Event) -> None:
        if event.who in self.verifiers:
            if event.what == "leave":
                self._lose_verifier(self.verifiers[event.who])
            elif not self.verifiers[event.who].serving:
                self._replace_verifier(event.who)
        elif event.who in self._specs:
            drafter = self.drafters.pop(event.who, None) if event.what == "leave" else self.drafters.get(event.who)
            if event.what == "join" and drafter is None:
                self._join(self._specs[event.who])
            elif drafter is not None and event.what != "join":
                drafter.suffer(event)

    def _lose_verifier(self, verifier: VerifierActor) -> None:
        verifier.stop()
        for name, spec in self._specs.items():
            if spec.verifier == verifier.name and name in self.drafters:
                self.drafters.pop(name).leave()
        self.traffic.move_from(verifier)

    def _replace_verifier(self, name: str) -> None:
        self.gone.append(self.verifiers[name])
        self._start_verifier(name)
        for spec in self._specs.values():
            if spec.verifier == name:
                self.events.after(_RECONNECT_S, partial(self._join, spec))

    # --- what came of it ---

    def _outcome(self) -> Outcome:
        requests, end = self.traffic.requests, self._scenario.seconds
        ended = [request.received_at[-1][0] for request in requests if request.over and request.received_at]
        if self.traffic.all_over and ended and self._scenario.arrivals != "poisson":
            end = max(ended)
        sample = Sample(0, end)
        for request in requests:
            times = [(at, count) for at, count in request.received_at if at <= end]
            if not times:
                continue
            first, last, count = times[0][0], times[-1][0], sum([count for _, count in times])
            sample.tokens += count
            sample.ttft.append(first - request.sent_at)
            sample.tpot.append((last - first) / max(count - 1, 1))
            sample.requests.append((first, last, count))
        sample.full_s = self.traffic.full_until or end
        outcome = Outcome(sample, request_count=len(requests), resubmitted_count=self.traffic.resubmitted_count)
        outcome.errors = [str(request.error) for request in requests if request.error is not None]
        for verifier in (*self.verifiers.values(), *self.gone):
            verifier.metrics.flush()
            _add(verifier.metrics.registry.collect(), sample.counters, outcome.drafters)
        return outcome


def _add(metrics: Iterable[Metric], counters: dict[str, float], drafters: dict[str, dict[str, float]]) -> None:
    """Add a verifier's counters, by the names that `bench.ways.counters` gives them; and each drafter's."""
    for metric in metrics:
        for point in metric.samples:
            key = counter_key(point.name, point.labels)
            if not key:
                continue
            counters[key] = counters.get(key, 0.0) + point.value
            if "drafter" in point.labels:
                position = point.labels.get("position")
                own = drafters.setdefault(point.labels["drafter"], {})
                key = f"{key}.{position}" if position else key
                own[key] = own.get(key, 0.0) + point.value


def simulate(scenario: Scenario, load: int, *, drafting: bool = True) -> Outcome:
    """Run a scenario with so many requests under way."""
    # Looking for cycles takes an eighth of the time, and they are few.
    collecting = gc.isenabled()
    gc.disable()
    try:
        return Simulation(scenario, load, drafting=drafting).run()
    finally:
        if collecting:
            gc.enable()
