"""Runs one simulation and gathers its figures."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from functools import partial

from outrider_bench.sample import Sample, counter_keys
from outrider_bench.simulator.drafter import DrafterActor
from outrider_bench.simulator.events import Events
from outrider_bench.simulator.production import Process
from outrider_bench.simulator.scenario import DrafterSpec, Event, Scenario
from outrider_bench.simulator.traffic import Request, Traffic
from outrider_bench.simulator.verifier import VerifierActor
from outrider_bench.simulator.world import World

# The time for cancelled requests to end, after the simulated time.
_DRAIN_S = 1000.0
# The time until a drafter connects to a verifier that came back.
_RECONNECT_S = 1.0


@dataclass(slots=True)
class Outcome:
    """The figures of one simulation. `drafters` has each drafter's counters, keyed by metric."""

    sample: Sample
    drafters: dict[str, dict[str, float]] = field(default_factory=dict)
    by_verifier: dict[str, Sample] = field(default_factory=dict)
    request_count: int = 0
    resubmitted_count: int = 0
    late_count: int = 0
    """The number of requests whose clients gave up, or did not read."""
    errors: list[str] = field(default_factory=list)


class Simulation:
    """A scenario with `load` requests in progress. Without `drafting` its drafters never join."""

    def __init__(
        self,
        scenario: Scenario,
        load: int,
        *,
        drafting: bool = True,
        verifier: type[VerifierActor] = VerifierActor,
    ) -> None:
        self.events = Events()
        self.world = World(scenario.seed, scenario.hard_share)
        self.verifiers: dict[str, VerifierActor] = {}
        self.gone: list[VerifierActor] = []
        self.drafters: dict[str, DrafterActor] = {}
        self._scenario = scenario
        self._verifier_type = verifier
        # The counters of each verifier when the measurement began.
        self._counted: dict[str, dict[str, float]] = {}
        self._processes: dict[str, Process] = {}
        self._specs: dict[str, DrafterSpec] = {}
        if drafting:
            self._specs = {drafter.name: drafter for drafter in scenario.drafters}
        for i in range(scenario.verifiers):
            self._start_verifier(f"verifier-{i + 1}")
        self.traffic = Traffic(self.events, scenario, load, self.world, self.verifiers, drafting)

    def run(self) -> Outcome:
        """Simulate the whole scenario; raise RuntimeError if pages or sequences are left in use."""
        scenario = self._scenario
        events = self.events
        for spec in self._specs.values():
            events.at(0.0, partial(self._join, spec))
        self.traffic.on_measured = self._begin_measuring
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

    def _begin_measuring(self) -> None:
        """Start the schedule, and note the counters so far."""
        began = self.traffic.began
        for event in self._scenario.schedule:
            self.events.at(began + event.at, partial(self._apply, event))
        if began > 0.0:
            self._counted = {
                verifier.name: _counters(verifier)[0] for verifier in self.verifiers.values()
            }

    # --- the schedule ---

    def _start_verifier(self, name: str) -> None:
        self.verifiers[name] = self._verifier_type(self.events, name, self._scenario, self.world)

    def _join(self, spec: DrafterSpec) -> None:
        verifier = self.verifiers[spec.verifier]
        if verifier.serving:
            process = self._processes.setdefault(spec.process or spec.name, Process())
            self.drafters[spec.name] = DrafterActor(
                self.events, spec, self._scenario.costs, self.world, verifier, process
            )

    def _apply(self, event: Event) -> None:
        if event.who in self.verifiers:
            self._apply_to_verifier(event)
        elif event.who in self._specs:
            self._apply_to_drafter(event)

    def _apply_to_verifier(self, event: Event) -> None:
        verifier = self.verifiers[event.who]
        if event.what == "leave":
            self._lose_verifier(verifier)
        elif not verifier.serving:
            self._replace_verifier(event.who)

    def _apply_to_drafter(self, event: Event) -> None:
        drafter = self.drafters.get(event.who)
        if drafter is None:
            if event.what == "join":
                self._join(self._specs[event.who])
        elif event.what != "join":
            if event.what == "leave":
                del self.drafters[event.who]
            drafter.apply(event)

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

    # --- the outcome ---

    def _outcome(self) -> Outcome:
        requests = self.traffic.measured
        began = self.traffic.began
        end = self._end(requests)
        full_s = (self.traffic.full_until or end) - began
        outcome = Outcome(
            _sample(requests, began, end, full_s),
            request_count=len(requests),
            resubmitted_count=self.traffic.resubmitted_count,
            late_count=sum([request.late for request in requests]),
        )
        outcome.errors = [str(request.error) for request in requests if request.error is not None]
        for verifier in (*self.verifiers.values(), *self.gone):
            counters, drafters = _counters(verifier)
            for name, value in self._counted.get(verifier.name, {}).items():
                counters[name] -= value
            own = [request for request in requests if request.verifier is verifier]
            sample = _sample(own, began, min(self._end(own), end), full_s)
            sample.counters = counters
            outcome.by_verifier[verifier.name] = sample
            _add(outcome.sample.counters, counters)
            for name, found in drafters.items():
                _add(outcome.drafters.setdefault(name, {}), found)
        for name, drafter in self.drafters.items():
            outcome.drafters.setdefault(name, {})["busy_seconds"] = drafter.computed_s
        return outcome

    def _end(self, requests: list[Request]) -> float:
        """Return when the measurement of these requests ended.

        If all requests have ended, the measurement ended with the last of these requests. Otherwise
        it ended when the time was up. With poisson arrivals it always ends when the time is up,
        because more requests could come.
        """
        ended = [
            request.received_at[-1][0]
            for request in requests
            if request.over and request.received_at
        ]
        if self.traffic.all_over and ended and self._scenario.arrivals != "poisson":
            return max(ended)
        return self._scenario.seconds


def _sample(requests: list[Request], began: float, end: float, full_s: float) -> Sample:
    """Return the tokens and latencies of these requests from `began` until `end`.

    The sample's times are relative to `began`.
    """
    sample = Sample(0, end - began, full_s=full_s)
    for request in requests:
        times = [(at, count) for at, count in request.received_at if at <= end]
        if not times:
            continue
        first = times[0][0]
        last = times[-1][0]
        count = sum([count for _, count in times])
        sample.tokens += count
        sample.ttft.append(first - request.sent_at)
        sample.tpot.append((last - first) / max(count - 1, 1))
        sample.requests.append((first - began, last - began, count))
        if request.stats is not None and request.stats.draft_count:
            stats = request.stats
            sample.count_drafts(request.text.kind, stats.draft_token_count, stats.histogram)
    return sample


def _counters(verifier: VerifierActor) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Return a verifier's counters and each drafter's counters.

    The keys are as in `outrider_bench.sample.counter_keys`.
    """
    counters: dict[str, float] = {}
    drafters: dict[str, dict[str, float]] = {}
    verifier.metrics.flush()
    for metric in verifier.metrics.registry.collect():
        for point in metric.samples:
            keys = counter_keys(point.name, point.labels)
            _add(counters, dict.fromkeys(keys, point.value))
            if keys and "drafter" in point.labels:
                own = drafters.setdefault(point.labels["drafter"], {})
                _add(own, {keys[0]: point.value})
    return counters, drafters


def _add(sums: dict[str, float], values: dict[str, float]) -> None:
    for name, value in values.items():
        sums[name] = sums.get(name, 0.0) + value


def simulate(scenario: Scenario, load: int, *, drafting: bool = True) -> Outcome:
    """Run a scenario with `load` requests in progress; raises as `Simulation.run` does."""
    # The search for reference cycles would take an eighth of the time, and would find few cycles.
    collecting = gc.isenabled()
    gc.disable()
    try:
        return Simulation(scenario, load, drafting=drafting).run()
    finally:
        if collecting:
            gc.enable()
