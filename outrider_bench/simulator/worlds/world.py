"""A simulated world: the plan, events, verifiers and counts that its actors share."""

from __future__ import annotations

import hashlib
from collections import Counter
from random import Random

from outrider_bench.simulator.events import Events
from outrider_bench.simulator.worlds.checked_verifier import CheckedVerifier
from outrider_bench.simulator.worlds.plan import WorldPlan


class World:
    """The verifiers of a plan, in virtual time."""

    def __init__(self, plan: WorldPlan) -> None:
        self.plan = plan
        self.events = Events()
        self.counts: Counter[str] = Counter()
        self._digest = hashlib.blake2b(digest_size=16)
        self.verifiers = {name: self.new_verifier(name) for name in plan.verifiers}

    def new_verifier(self, name: str) -> CheckedVerifier:
        """Return a verifier with the plan's settings."""
        return CheckedVerifier(self.events, name, self.plan.engine, self.counts)

    def random(self, name: str) -> Random:
        """Return an actor's own generator, so that a world without another actor changes little."""
        return Random(f"{self.plan.seed} {name}")

    def note(self, what: str) -> None:
        """Add an event to the digest."""
        self._digest.update(f"{self.events.now!r} {what}\n".encode())

    @property
    def digest(self) -> str:
        """A hash of all events so far."""
        return self._digest.hexdigest()

    def least_loaded(self, but: CheckedVerifier | None) -> CheckedVerifier | None:
        """Return the serving verifier with the fewest requests, other than `but` if possible."""
        serving = [each for each in self.verifiers.values() if each.serving]
        others = [each for each in serving if each is not but]
        return min(others or serving, key=lambda each: each.open_requests, default=None)
