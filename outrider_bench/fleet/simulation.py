"""Runs a fleet in time steps: requests come, are routed, drafted for, served and end.

The drafters' and verifiers' work is in `servers`; this file has the queues.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from outrider_bench.fleet.faults import Faults
from outrider_bench.fleet.layout import Floats, Layout, lay_out, rates_at
from outrider_bench.fleet.queues import ABSENT, fill, spread
from outrider_bench.fleet.recorder import Recorder, Step
from outrider_bench.fleet.requests import Requests
from outrider_bench.fleet.servers import BAD, CLASS_COUNT, GOOD, PLAIN, Servers
from outrider_bench.fleet.spec import Fleet

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class Simulation:
    """One fleet over its hours. The same seed gives the same figures."""

    def __init__(self, fleet: Fleet, servers: Servers, peaks: Floats) -> None:
        """`peaks` are new requests a second of each region in its busiest hour."""
        self._fleet = fleet
        self._servers = servers
        self._peaks = peaks
        self._layout: Layout = lay_out(fleet)
        self._random = np.random.default_rng(fleet.seed)
        self._faults = Faults(fleet, self._layout.drafter_count, self._random)
        self._running = Requests()
        self._waiting = Requests()
        self._ended = Requests()
        self._now = 0.0

    def run(self) -> Recorder:
        """Simulate all hours."""
        days, recorder = self._fleet.days, Recorder(self._fleet, self._layout)
        warm_up, window = (round(s / days.step_s) for s in (days.warm_up_s, days.window_s))
        for number, hour in enumerate(days.hours):
            rates = rates_at(self._fleet, self._peaks, hour)
            if number == 0:
                self._begin(rates)
            for _ in range(warm_up):
                self._step(rates)
            recorder.begin(hour)
            for _ in range(max(window, 1)):
                recorder.add(self._step(rates))
        return recorder

    def _begin(self, rates: Floats) -> None:
        """Start with requests under way, each somewhere in its text, as many as the rate keeps."""
        fleet = self._fleet
        sizes = np.array([region.peak_sequences for region in fleet.regions.values()])
        if fleet.traffic.arrivals == "poisson":
            sizes = np.round(sizes * rates / self._peaks).astype(int)
        region = np.repeat(np.arange(len(sizes)), sizes)
        requests = self._drawn(region, np.zeros(len(region)))
        self._route(requests)
        self._admit()
        running = self._running
        running.left *= self._random.random(len(running))
        running.first_at[:] = running.served_until[:] = self._now

    def _step(self, rates: Floats) -> Step:
        step_s = self._fleet.days.step_s
        self._lose(self._faults.step())
        arrivals = self._arrivals(rates)
        self._route(arrivals)
        self._admit()
        running, kinds = self._running, self._kinds(self._running.drafter)
        # Requests that come during the step do not weigh, since those that end during it weigh in
        # full.
        here = (running.sent_at <= self._now).astype(float)
        loads = self._loads(running, here)
        shares, slowness, streams = self._drafting(here, kinds)
        speeds = self._servers.speeds(loads, shares, slowness)
        rate = 1.0 / (speeds.token_s[running.verifier, kinds] * running.stretch)
        made, begun, over = self._serve(rate)
        self._ended = running.take(over)
        self._running = running.take(~over)
        return Step(
            step_s=step_s,
            ended=self._ended,
            made=self._by_region(running, made),
            first_count=int(begun.sum()),
            under_way=self._by_region(running, here) + self._by_region(self._waiting),
            kinds=np.bincount(kinds, minlength=CLASS_COUNT),
            busy=np.minimum(speeds.busy * streams, 1.0),
            arrived=(len(arrivals), int((arrivals.away_s > 0).sum())),
        )

    def _serve(self, rate: Floats) -> tuple[Floats, Bools, Bools]:
        """Let a time step pass; `rate` is in tokens a second.

        Returns for each request its new tokens, whether its first token came, and whether it ended.
        `served_until` of a request that ended is the time of its end.
        """
        running = self._running
        self._now += self._fleet.days.step_s
        begun = (running.served_until == running.first_at) & (running.first_at <= self._now)
        ends_at = running.served_until + running.left / rate
        until = np.maximum(np.minimum(ends_at, self._now), running.served_until)
        made = rate * (until - running.served_until)
        running.left -= made
        running.served_until[:] = until
        return made, begun, ends_at <= self._now

    # --- requests come ---

    def _arrivals(self, rates: Floats) -> Requests:
        """New requests of this step; with closed arrivals, of the clients whose last one ended."""
        traffic, step_s = self._fleet.traffic, self._fleet.days.step_s
        if traffic.arrivals == "closed":
            return self._drawn(
                self._ended.region, self._ended.served_until + traffic.client_ms / 1000
            )
        region = np.repeat(np.arange(len(rates)), self._random.poisson(rates * step_s))
        return self._drawn(region, self._now + step_s * self._random.random(len(region)))

    def _drawn(self, region: Ints, sent_at: Floats) -> Requests:
        lengths = self._fleet.traffic.output_tokens
        shortest = lengths[0]
        longest = lengths[-1]
        length = self._random.integers(shortest, longest + 1, len(region))
        order = np.argsort(sent_at, kind="stable")
        return Requests(region=region[order], sent_at=sent_at[order], length=length)

    def _route(self, requests: Requests) -> None:
        """Send each to the least loaded verifier of its region; elsewhere if all are full."""
        layout = self._layout
        most = self._fleet.verifiers.max_sequences
        loads = self._loads(self._running) + self._loads(self._waiting)
        requests.verifier[:] = self._choose(loads, requests.region, layout.verifiers_of, most)
        abroad = np.nonzero(requests.verifier < 0)[0]
        if len(abroad):
            loads += np.bincount(requests.verifier[requests.verifier >= 0], minlength=len(loads))
            everyone = np.arange(len(loads))[None, :]
            nobody = np.zeros(len(abroad), dtype=np.int64)
            chosen = self._choose(loads, nobody, everyone, most)
            requests.verifier[abroad] = chosen
            requests.away_s[abroad] = self._fleet.traffic.between_regions_ms / 1000
            lost = abroad[chosen < 0]
            at_home = self._choose(loads, requests.region[lost], layout.verifiers_of, ABSENT - 1)
            requests.verifier[lost] = at_home
            requests.away_s[lost] = 0.0
        self._waiting.add(requests)

    @staticmethod
    def _choose(loads: Floats, groups: Ints, names: Ints, room: int) -> Ints:
        absent = names < 0
        table = np.where(absent, ABSENT, loads[np.maximum(names, 0)]).astype(np.int64)
        counts = fill(table, np.bincount(groups, minlength=len(names)), room)
        return spread(counts, groups, names)

    def _admit(self) -> None:
        """Let those that wait longest begin where a verifier has room."""
        waiting = self._waiting
        if not len(waiting):
            return
        loads = self._loads(self._running)
        room = self._fleet.verifiers.max_sequences - loads
        order = np.argsort(waiting.verifier, kind="stable")
        sizes = np.bincount(waiting.verifier, minlength=len(loads))
        rank = np.empty(len(waiting), dtype=np.int64)
        rank[order] = np.arange(len(waiting)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        begins = rank < room[waiting.verifier]
        admitted, self._waiting = waiting.take(begins), waiting.take(~begins)
        self._waiting.waited[:] = 1
        admitted.drafter[:] = self._hand_out(admitted.verifier)
        kinds = self._kinds(admitted.drafter)
        luck = self._random.random((3, len(admitted)))
        here = loads[admitted.verifier] + 1.0
        ttft_s = self._servers.draw_ttft(here, kinds, luck[0], luck[2])
        began_at = np.where(admitted.waited > 0, self._now, admitted.sent_at)
        admitted.first_at[:] = began_at + ttft_s + admitted.away_s
        admitted.served_until[:] = admitted.first_at
        admitted.stretch[:] = self._servers.draw_stretch(here, kinds, luck[1])
        admitted.left[:] = admitted.length - 1
        self._running.add(admitted)

    # --- drafters ---

    def _hand_out(self, verifiers: Ints) -> Ints:
        """For each verifier, the process of its group with the fewest sequences; -1 for none."""
        layout = self._layout
        if layout.drafter_count == 0:
            return np.full(len(verifiers), -1)
        held = self._running.drafter[self._running.drafter >= 0]
        loads = np.bincount(held, minlength=layout.drafter_count).astype(float)
        loads[~self._faults.up] = ABSENT
        room = self._fleet.drafters.max_sequences
        return self._choose(loads, layout.group_of[verifiers], layout.drafters_of, room)

    def _lose(self, gone: Bools) -> None:
        """Hand the sequences of lost processes to others."""
        if gone.any():
            running = self._running
            orphans = np.nonzero((running.drafter >= 0) & gone[np.maximum(running.drafter, 0)])[0]
            running.drafter[orphans] = -1
            running.drafter[orphans] = self._hand_out(running.verifier[orphans])

    def _kinds(self, drafter: Ints) -> Ints:
        """The class of each sequence, by its drafter's link."""
        if self._layout.drafter_count == 0:
            return np.full(len(drafter), PLAIN)
        linked = np.where(self._faults.bad[np.maximum(drafter, 0)], BAD, GOOD)
        return np.where(drafter < 0, PLAIN, linked)

    def _drafting(self, here: Floats, kinds: Ints) -> tuple[Floats, Floats, Floats]:
        """Shares of the classes (V, classes), slowness (V,) and streams of each drafter (V,).

        `here` weighs the running requests.
        """
        layout = self._layout
        running = self._running
        place = running.verifier * CLASS_COUNT + kinds
        size = len(layout.region_of) * CLASS_COUNT
        counts = np.bincount(place, here, size).reshape(-1, CLASS_COUNT)
        loads = counts.sum(axis=1)
        shares = counts / np.maximum(loads, 1.0)[:, None]
        shares[loads == 0.0, GOOD if layout.drafter_count else PLAIN] = 1.0
        drafted = np.bincount(layout.group_of, counts[:, [GOOD, BAD]].sum(axis=1))
        present = layout.drafters_of >= 0
        if layout.drafter_count:
            present = present & self._faults.up[np.maximum(layout.drafters_of, 0)]
        each = (drafted / np.maximum(present.sum(axis=1), 1))[layout.group_of]
        drafters = self._fleet.drafters
        slowness = self._servers.slowness(np.maximum(loads, 1.0), each, drafters)
        streams = 1
        if drafters.passes == "in-turn":
            streams = drafters.shared_by
        return shares, slowness, np.clip(each, 0.0, streams)

    # --- counts ---

    def _loads(self, requests: Requests, weights: Floats | None = None) -> Floats:
        """Requests of each verifier, or the sums of their weights."""
        count = len(self._layout.region_of)
        return np.bincount(requests.verifier, weights, count).astype(float)

    def _by_region(self, requests: Requests, what: Floats | None = None) -> Floats:
        """Sums of something, or counts, by the region that serves the requests."""
        places = self._layout.region_of[requests.verifier]
        return np.bincount(places, what, len(self._layout.regions)).astype(float)
