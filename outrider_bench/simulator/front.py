"""All that computes for a verifier's requests outside its engine: streams, gateway and client."""

from __future__ import annotations

from outrider_bench.simulator.cores import Worker
from outrider_bench.simulator.costs import Costs


class Front:
    """Takes its time from the cores that it shares with verifiers, one piece after the other.

    Alone it makes no message later, because the latency of clients was measured with its work.
    """

    def __init__(self, worker: Worker, costs: Costs) -> None:
        self._worker = worker
        self._costs = costs
        self._free_at = 0.0

    def request(self) -> float:
        """Work on a new request; returns the seconds by which others delay it."""
        return self._work(self._costs.front_request_s)

    def message(self) -> float:
        """Work on a message with tokens; returns the seconds by which others delay it."""
        return self._work(self._costs.front_message_s)

    def _work(self, seconds: float) -> float:
        if self._worker.cores is None or seconds <= 0.0:
            return 0.0
        now = self._worker.events.now
        [self._free_at] = self._worker.ends(max(now, self._free_at), [seconds])
        return max(self._free_at - now - seconds, 0.0)
