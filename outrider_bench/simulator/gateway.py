"""The gateway of a simulation: it admits requests as the production gateway does."""

from __future__ import annotations

import math
from collections import Counter

from gateway.generation.admission import ClientTimeout, TotalLoad, check, total_load
from outrider_bench.simulator.events import Events
from outrider_bench.simulator.verifier import VerifierActor

_POLL_S = 1.0


class GatewayActor:
    """Counts running requests, and refuses requests that would take longer than `timeout_s`.

    Without a timeout it refuses no requests.
    """

    def __init__(
        self, events: Events, verifiers: dict[str, VerifierActor], timeout_s: float | None
    ) -> None:
        self._events = events
        self._verifiers = verifiers
        self._timeout_s = timeout_s
        self._counts: Counter[str] = Counter()
        self._polled_at = -math.inf
        self._load: TotalLoad | None = None

    def enter(self, tenant: str) -> None:
        """Count a new request.

        Raises OutriderError(OVERLOADED) if the request would end too late.
        """
        if self._timeout_s is not None:
            self._poll()
            if self._load is not None:
                check(self._load, self._counts, 0, tenant, 1, ClientTimeout(self._timeout_s))
        self._counts[tenant] += 1

    def leave(self, tenant: str) -> None:
        """Stop counting a request."""
        self._counts[tenant] -= 1

    def _poll(self) -> None:
        """Ask the verifiers for their load, unless they were asked less than a second ago."""
        if self._events.now - self._polled_at < _POLL_S:
            return
        self._polled_at = self._events.now
        serving = [verifier for verifier in self._verifiers.values() if verifier.serving]
        self._load = total_load(
            [verifier.engine.scheduler.load_meter.load() for verifier in serving]
        )
