"""Computes masks on the engine's thread or on other threads, and bounds their processor time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from outrider.errors import OutriderError, Reason, invalid
from outrider.process.clock import Clock, monotonic
from outrider.process.workers.tenant_threads import TenantThreads
from verifier_svc.state.mask_work import MaskWork
from verifier_svc.state.sequence import Sequence as SequenceState

# The part of each mask's processor time that is not charged to the budget (seconds). Usual masks
# take 0.05 to 0.5 ms.
_FREE_S = 0.02
# The number of a tenant's requests that can use up their budgets at the same time. In each second
# the tenant's budget regains `_REFILL` seconds.
_TENANTS_REQUESTS = 5
_REFILL = 0.1
# The number of tenants whose slow masks are computed at the same time. The threads have a lower
# priority than the engine, so that the forward keeps the processors.
_SLOW_THREADS = 2
_SLOW_NICE = 10
# If the masks of this many tenants turn out slow at the same time, the masks of the other tenants
# have to wait.
_FAST_THREADS = 8
_FAST_NICE = 5


class MaskLanes(Protocol):
    """Computes masks beside the engine's thread."""

    def begin(self, works: Sequence[MaskWork], tenant: str) -> None:
        """Start to compute a tenant's masks for the step in progress, in this order."""

    def begin_slow(self, work: MaskWork, tenant: str) -> None:
        """Start to compute masks that take long; they delay only the tenant's other slow masks."""

    def wait(self, works: Sequence[MaskWork], seconds: float) -> None:
        """Wait until all works are done, for at most `seconds`."""


class Inline:
    """Computes masks at once, on the engine's thread. For tests and simulations."""

    def begin(self, works: Sequence[MaskWork], tenant: str) -> None:
        """Compute the masks."""
        for work in works:
            work.run()

    def begin_slow(self, work: MaskWork, tenant: str) -> None:
        """Compute the masks."""
        work.run()

    def wait(self, works: Sequence[MaskWork], seconds: float) -> None:
        """Return at once: all works are done already."""


class Threads:
    """Computes masks on threads; LLGuidance lets other threads run meanwhile."""

    def __init__(self) -> None:
        self._fast = TenantThreads(_FAST_THREADS, "masks", each=1, nice=_FAST_NICE)
        self._slow = TenantThreads(_SLOW_THREADS, "slow-masks", each=1, nice=_SLOW_NICE)

    def begin(self, works: Sequence[MaskWork], tenant: str) -> None:
        """Queue `works` as one piece of work, to switch between threads less often."""

        def run() -> None:
            for work in works:
                work.run()

        self._fast.submit(tenant, run)

    def begin_slow(self, work: MaskWork, tenant: str) -> None:
        """Queue `work`; a slow thread runs it when it is the tenant's turn."""
        self._slow.submit(tenant, work.run)

    def wait(self, works: Sequence[MaskWork], seconds: float) -> None:
        """Wait until all `works` are done, or `seconds` have passed."""
        until = monotonic() + seconds
        for work in works:
            if not work.done and not work.wait(max(0.0, until - monotonic())):
                return


class MaskBudget:
    """Bounds the processor time of masks: `seconds` for a request, five times that for a tenant.

    Only time beyond 20 ms a mask counts. A tenant's budget comes back with time, a request's does
    not.
    """

    def __init__(self, seconds: float, clock: Clock = monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        # What each tenant has used (seconds), and when that was noted.
        self._used: dict[str, tuple[float, float]] = {}

    def charge(self, sequence: SequenceState, work: MaskWork) -> None:
        """Charge the sequence and its tenant for work that is done."""
        rows = len(work.draft.token_ids) + 1
        sequence.mask_row_s = work.seconds / rows
        excess_s = _excess(work)
        if excess_s > 0.0:
            sequence.mask_excess_s += excess_s
            tenant = sequence.request.tenant
            self._used[tenant] = self._of_tenant(tenant) + excess_s, self._clock()

    def error(self, sequence: SequenceState) -> OutriderError | None:
        """Return why the sequence has to end; None if it may go on.

        Work in progress counts too.
        """
        work = sequence.mask_work
        pending_s = _excess(work) if work is not None else 0.0
        grammar = sequence.request.grammar
        field = "grammar" if grammar is None else grammar.field
        free = f"of processor time, not counting {1000 * _FREE_S:g} ms a mask"
        if sequence.mask_excess_s + pending_s > self._seconds:
            limit = f"take more than {self._seconds:g} s {free}"
            return invalid(field, f"can be read in too many ways: its masks {limit}")
        most = _TENANTS_REQUESTS * self._seconds
        tenant = sequence.request.tenant
        if not self._used or (sequence.mask_excess_s == 0.0 and pending_s == 0.0):
            return None
        used_s = self._of_tenant(tenant) + pending_s
        if used_s <= most:
            return None
        message = f"{field}: the masks of all your grammars have taken more than {most:g} s {free}"
        retry_s = (used_s - most + self._seconds) / _REFILL
        return OutriderError(Reason.RATE_LIMIT_EXCEEDED, message, field, retry_after_s=retry_s)

    def _of_tenant(self, tenant: str) -> float:
        """Return how much of its budget the tenant has used and not regained (seconds)."""
        used_s, at = self._used.get(tenant, (0.0, 0.0))
        left_s = used_s - _REFILL * max(0.0, self._clock() - at)
        if left_s <= 0.0:
            self._used.pop(tenant, None)
            return 0.0
        return left_s


def _excess(work: MaskWork) -> float:
    return max(0.0, work.seconds - _FREE_S * (len(work.draft.token_ids) + 1))
