"""Refuses requests for which the verifiers have no room or no time, before any work on them.

The verifiers report their load with each poll. Between two polls, a gateway counts its own
sequences. A verifier decides in the end: it refuses requests if several gateways together send too
many.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import NamedTuple

from gateway.metrics import GatewayMetrics
from gateway.upstream.routing import Router
from outrider.errors import OutriderError, Reason
from outrider.protocol.model_info import Load, retry_after_s, wait_s

# Safety factor on the estimated times of the wait and of the answer, because recent answers may
# have been measured in smaller batches. Without this factor, a verifier that became slower would
# make every admitted answer late.
_MARGIN = 2.0
# The clients of OpenAI and Anthropic send this timeout (seconds) if nobody has chosen a timeout.
# So this value does not show that the caller wants to wait for that long.
_UNCHOSEN_S = 600.0


@dataclass(frozen=True, slots=True)
class ClientTimeout:
    """The seconds that a caller waits for the whole answer, and for the first token.

    None means that the caller named no limit.
    """

    total_s: float | None = None
    first_s: float | None = None

    @property
    def is_chosen(self) -> bool:
        """True if the caller chose the timeout. Any other caller waits for `--patience-seconds`."""
        return not {self.total_s, self.first_s} <= {None, _UNCHOSEN_S}

    def ends_at(self, now: float) -> float:
        """Return the time at which the caller gives the answer up; infinity without `total_s`."""
        return math.inf if self.total_s is None else now + self.total_s

    def suffices(self, wait_s: float, answer_s: float) -> bool:
        """True if the caller accepts `wait_s` until its turn, and then `answer_s` of answering."""
        if self.first_s is not None and wait_s > self.first_s:
            return False
        return self.total_s is None or wait_s + answer_s <= self.total_s


class Admission:
    """Counts this gateway's sequences from their request's arrival on, and refuses requests."""

    def __init__(self, router: Router, metrics: GatewayMetrics, patience_s: float = 0.0) -> None:
        """Callers that choose no timeout wait `patience_s` for their first token.

        With 0 they wait for ever.
        """
        self._router = router
        self._patience_s = patience_s or None
        self._metrics = metrics
        self.counts: dict[str, Counter[str]] = {}
        """The number of running and waiting sequences, keyed by model and tenant."""

    def admit(self, model: str, tenant: str, count: int, timeout: ClientTimeout) -> AdmissionSlots:
        """Count the sequences of a new request for a model.

        Raises OutriderError(OVERLOADED), with the seconds after which a retry makes sense, if the
        verifiers have no room for them, or if their answers would be late.
        """
        if not timeout.is_chosen:
            timeout = replace(timeout, first_s=self._patience_s or timeout.first_s)
        if model not in self.counts:
            self.counts[model] = Counter()
            self._metrics.begin(model)
        counts = self.counts[model]
        picks = self._router.ready_picks(model)
        load = total_load([pick.info.load for pick in picks])
        if load is not None:
            foreign_count = sum(pick.replica.foreign_count for pick in picks)
            try:
                check(load, counts, foreign_count, tenant, count, timeout)
            except OutriderError:
                self._metrics.refused.labels(model).inc()
                raise
        return AdmissionSlots(counts, tenant, count, timeout.ends_at(time.monotonic()))

    def only_model(self) -> str | None:
        """Return the only model that is served; None if there is no model or more than one."""
        models = list(self._router.models)
        return models[0] if len(models) == 1 else None


class AdmissionSlots:
    """The slots that one request holds, one per sequence. A `with` block frees them at its end."""

    def __init__(self, counts: Counter[str], tenant: str, count: int, ends_at: float) -> None:
        self.ends_at = ends_at
        """The time after which nobody waits for the answer (monotonic seconds)."""
        self._counts = counts
        self._tenant = tenant
        self._left = 0
        self._add(count)

    def _add(self, count: int) -> None:
        self._left += count
        self._counts[self._tenant] += count
        if self._counts[self._tenant] == 0:
            del self._counts[self._tenant]

    def release(self) -> None:
        """Stop counting a sequence that has ended, or that its client does not read."""
        self._add(-min(1, self._left))

    def acquire_again(self) -> None:
        """Count a sequence that `release` stopped counting.

        The sequence has started, so it is not refused.
        """
        self._add(1)

    def close(self) -> None:
        """Stop counting all of the request's sequences."""
        self._add(-self._left)

    def __enter__(self) -> AdmissionSlots:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        self.close()


class TotalLoad(NamedTuple):
    """The load of a model's verifiers together. All counts are numbers of sequences."""

    places: int
    """The number of sequences that can run at once."""
    most: int
    """The number of sequences that can run or wait at once."""
    sequence_s: float | None
    """The time that a sequence is expected to be in a batch (seconds); None if it is not known."""

    def wait_s(self, count: int, places: float) -> float:
        """Return how many seconds the last of `count` sequences waits for one of the `places`."""
        return wait_s(count, places, self.sequence_s)


def total_load(reported: Sequence[Load | None]) -> TotalLoad | None:
    """Return the load of all verifiers of a model.

    Return None if there is no verifier, or if a verifier does not report its load.
    """
    loads = [load for load in reported if load is not None]
    if not loads or len(loads) < len(reported):
        return None
    times = [load.sequence_s for load in loads if load.sequence_s is not None]
    return TotalLoad(
        sum(load.places for load in loads),
        sum(load.max_running + load.max_waiting for load in loads),
        sum(times) / len(times) if times else None,
    )


def check(
    load: TotalLoad,
    counts: Mapping[str, int],
    foreign_count: int,
    tenant: str,
    count: int,
    timeout: ClientTimeout,
) -> None:
    """Raise OutriderError(OVERLOADED) if a tenant's `count` new sequences are too many or too late.

    `counts` maps each tenant to its number of sequences under way; `foreign_count` is the number of
    sequences of other gateways.
    """
    own = counts.get(tenant, 0)
    under_way = sum(counts.values()) + foreign_count
    # No sequence is under way, so the request is admitted however many choices it wants. A request
    # that is late ends at its deadline.
    if under_way == 0:
        return
    # A full queue drops a request of the tenant with the largest use to make room for a tenant with
    # less use. So the verifier must see this request unless its tenant has the largest use. If the
    # tenant has no requests here, the tenant with the largest use may be at another gateway.
    is_largest = own + count >= max(counts.values(), default=0) and (own > 0 or foreign_count == 0)
    if under_way + count > load.most and is_largest:
        waiting = max(0, under_way - load.places)
        late_s = load.wait_s(under_way + count, load.places)
        raise _refusal(f"{waiting} requests are waiting already", late_s)
    # The tenants of foreign sequences are unknown, so all these sequences count as one tenant's.
    rivals = [each for name, each in counts.items() if name != tenant]
    late_s = load.wait_s(own + count, fair_share(load.places, [*rivals, foreign_count]))
    answer_s = load.sequence_s or 0.0
    if late_s > 0.0 and not timeout.suffices(_MARGIN * late_s, _MARGIN * answer_s):
        message = f"the answer would be late: requests wait {late_s:.1f} s for their turn now"
        raise _refusal(message, late_s)


def fair_share(places: int, rivals: Sequence[int]) -> float:
    """Return how many places a tenant gets if it wants all of them.

    `rivals` has the number of places that each other tenant wants. The verifier gives a free place
    to the tenant with the fewest places. So a rival that wants less than an equal share gets what
    it wants, and the other tenants share the remaining places.
    """
    left = float(places)
    sharing = 1 + len(rivals)
    for wanted in sorted(rivals):
        if wanted * sharing >= left:
            break
        left -= wanted
        sharing -= 1
    return left / sharing


def _refusal(message: str, late_s: float) -> OutriderError:
    return OutriderError(Reason.OVERLOADED, message, retry_after_s=retry_after_s(late_s))
