"""Runs a simulated world to its end and checks it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from outrider_bench.simulator.worlds.checked_verifier import CheckedVerifier
from outrider_bench.simulator.worlds.client import Client
from outrider_bench.simulator.worlds.invariants import broken, check_quiet
from outrider_bench.simulator.worlds.plan import Fault, WorldPlan
from outrider_bench.simulator.worlds.random_drafter import RandomDrafter
from outrider_bench.simulator.worlds.world import World

# All requests must end within this many seconds after the last fault.
_MOST_S = 120.0
# The seconds in which the remaining messages arrive.
_SETTLE_S = 3.0
_LOOK_S = 0.25
_MOST_REPEATS = 0.5
_SLOWER = 20.0


@dataclass(slots=True)
class Played:
    """Counts of a simulated world's events, and their digest. Equal worlds have equal digests."""

    counts: Counter[str] = field(default_factory=Counter)
    digest: str = ""


class _Play(World):
    """A simulated world with its drafters and clients."""

    def __init__(self, plan: WorldPlan) -> None:
        super().__init__(plan)
        self.drafters = {each.name: RandomDrafter(self, each) for each in plan.drafters}
        self.clients = {each.name: Client(self, each) for each in plan.requests}

    def play(self) -> Played:
        """Play all events; raise Violation, or what the code under test raises."""
        events = self.events
        for drafter in self.drafters.values():
            drafter.dial(drafter.plan.joins_s)
        for client in self.clients.values():
            events.at(client.plan.at_s, client.ask)
        for fault in self.plan.faults:
            events.at(fault.at_s, self._planned(fault))
        self._run_until(self.plan.faults_end_s)
        self._calm()
        deadline = events.now + _MOST_S
        while any(not client.end for client in self.clients.values()):
            if events.now > deadline:
                left = [client.plan.name for client in self.clients.values() if not client.end]
                broken("each request ends", left)
            self._run_until(events.now + _LOOK_S)
        self._run_until(events.now + _SETTLE_S)
        self._check_quiet()
        return Played(self.counts, self.digest)

    def _run_until(self, time: float) -> None:
        self.events.run(time)
        self.events.now = max(self.events.now, time)

    # --- faults ---

    def _planned(self, fault: Fault) -> Callable[[], None]:
        def begin() -> None:
            drafter = self.drafters.get(fault.who)
            client = self.clients.get(fault.who)
            self.note(f"{fault.who}: {fault.what}")
            self.counts["faults"] += 1
            self.counts[f"fault: {fault.who.partition('-')[0]}: {fault.what}"] += 1
            if drafter is not None:
                self._hit_drafter(drafter, fault)
            elif client is not None:
                self._hit_client(client, fault)
            elif fault.who in self.verifiers:
                self._hit_verifier(fault)
            # If a world is being shrunk, it may lack the fault's actor.

        return begin

    def _hit_drafter(self, drafter: RandomDrafter, fault: Fault) -> None:
        events = self.events
        ends = events.now + fault.seconds
        connection = drafter.connection
        if fault.what in ("leave", "drain") and connection is not None:
            leaving = connection
            if fault.what == "drain":
                leaving.drain()
            events.after(fault.seconds / 2, leaving.leave)
            drafter.dial(fault.seconds)
        elif fault.what == "die" and connection is not None:
            connection.lose(fault.seconds)
        elif fault.what == "hang":
            drafter.hangs_until = ends
        elif fault.what == "clock":
            drafter.skew_s += fault.amount
        self._hit_links(drafter, fault, ends)

    def _hit_links(self, drafter: RandomDrafter, fault: Fault, ends: float) -> None:
        share = min(abs(fault.amount), 1.0)
        up, down = drafter.up, drafter.down
        if fault.what in ("held", "held up"):
            up.held_until = ends
        if fault.what in ("held", "held down"):
            down.held_until = ends
        if fault.what == "slow":
            up.slowness = down.slowness = _SLOWER
        elif fault.what == "shuffled":
            up.shuffles = True
        elif fault.what == "repeated":
            up.repeats = down.repeats = min(share, _MOST_REPEATS)
        elif fault.what == "lost up":
            up.loses = share
        elif fault.what == "lost down":
            down.loses = share
        else:
            return
        self.events.at(ends, up.heal)
        self.events.at(ends, down.heal)

    def _hit_client(self, client: Client, fault: Fault) -> None:
        if fault.what == "leave":
            client.leave()
        else:
            client.move(fault.seconds)

    def _hit_verifier(self, fault: Fault) -> None:
        verifier = self.verifiers[fault.who]
        if fault.what == "kill":
            self._kill(verifier, fault.seconds)
        elif fault.what == "clock":
            verifier.skew_s += fault.amount
        elif fault.what == "forward fails":
            verifier.target.fails_next = True
        else:
            verifier.target.slowness = _SLOWER

    def _kill(self, verifier: CheckedVerifier, seconds: float) -> None:
        """Let a verifier vanish; after `seconds` another process replaces it."""
        if not verifier.serving:
            return
        verifier.stop()
        name = verifier.name

        def restart() -> None:
            self.verifiers[name] = self.new_verifier(name)

        self.events.after(seconds, restart)
        for drafter in self.drafters.values():
            if drafter.connection is not None and drafter.connection.verifier is verifier:
                drafter.connection.lose()
        for client in self.clients.values():
            self.events.after(client.plan.latency_s, self._tell(client, verifier))

    def _tell(self, client: Client, verifier: CheckedVerifier) -> Callable[[], None]:
        return lambda: client.lost(verifier)

    def _calm(self) -> None:
        """End the faults that do not end by themselves."""
        for drafter in self.drafters.values():
            drafter.hangs_until = 0.0
            drafter.up.heal()
            drafter.down.heal()
        for verifier in self.verifiers.values():
            verifier.target.slowness = 1.0
            verifier.target.fails_next = False

    # --- the end ---

    def _check_quiet(self) -> None:
        for verifier in self.verifiers.values():
            check_quiet(verifier.engine)
        for drafter in self.drafters.values():
            connection = drafter.connection
            if connection is not None and not connection.over and connection.session.sequences:
                left = [*connection.session.sequences]
                broken("a drafter has no sequence left", f"{drafter.plan.name}: {left}")
        self.counts["worlds"] += 1
        self.counts["invariants checked"] += len(self.verifiers) * 6 + len(self.drafters)


def play(plan: WorldPlan) -> Played:
    """Play a world; raise Violation, or what the code under test raises."""
    return _Play(plan).play()
