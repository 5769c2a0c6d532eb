"""Threads that serve tenants in turns, so that no tenant can block another tenant's work."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

_Result = TypeVar("_Result")
_Job = tuple[Future[Any], Callable[[], Any]]
# If a piece of work takes longer than this, its tenant's budget is charged with the excess.
_FREE_S = 0.1
_BUDGET_S = 2.0
# The budget regains this much in a second.
_BACK_S = 0.1
_LOOK_AGAIN_S = 0.5
# If more budgets than this are known, tenants with whole budgets are forgotten.
_MOST_BUDGETS = 1000


class TenantThreads:
    """A fixed number of daemon threads, and a queue for each tenant.

    A free thread takes the work of the tenant with the fewest running pieces of work. If several
    tenants have the fewest, it takes the work of the tenant that was served longest ago. If `each`
    is given, a tenant has at most `each` threads. If not, and there are several threads, a tenant
    never has all of them, so that another tenant need not wait for running work. Each thread has a
    stack of `stack_bytes`, if given, and runs at the priority `nice`, where the system has
    priorities of threads.

    All slow tenants together leave `spare` threads free, so that another tenant need not wait,
    however many slow tenants there are. A tenant is slow while it has used up its budget: 2 s
    beyond the 0.1 s that each piece of work may take. The budget refills by 0.1 s a second.
    """

    def __init__(
        self,
        count: int,
        name: str,
        *,
        each: int = 0,
        spare: int = 0,
        stack_bytes: int = 0,
        nice: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most = each or max(1, count - 1)
        self._most_slow = count - spare
        self._budgets = _Budgets(clock)
        self._clock = clock
        self._nice = nice
        self._changed = threading.Condition()
        self._waiting: dict[str, deque[_Job]] = {}
        self._running: Counter[str] = Counter()
        self._served: dict[str, int] = {}
        self._turn = 0
        self._closed = False
        usual = threading.stack_size(stack_bytes)
        try:
            for i in range(count):
                threading.Thread(target=self._run, name=f"{name}-{i}", daemon=True).start()
        finally:
            threading.stack_size(usual)

    def submit(self, tenant: str, work: Callable[[], _Result]) -> Future[_Result]:
        """Queue a piece of work; cancelling the future removes the work unless it has started."""
        future: Future[_Result] = Future()
        with self._changed:
            self._waiting.setdefault(tenant, deque()).append((future, work))
            self._changed.notify()
        return future

    def close(self) -> None:
        """End each thread after its present work, and cancel queued work."""
        with self._changed:
            self._closed = True
            for jobs in self._waiting.values():
                for future, _ in jobs:
                    future.cancel()
            self._waiting.clear()
            self._changed.notify_all()

    def _run(self) -> None:
        if self._nice and sys.platform == "linux":
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._nice)
        while (taken := self._take()) is not None:
            tenant, (future, work) = taken
            began = self._clock()
            if future.set_running_or_notify_cancel():
                _fulfil(future, work)
            # A thread that waits must not keep the last result alive.
            del future, work
            with self._changed:
                self._budgets.charge(tenant, self._clock() - began)
                self._running[tenant] -= 1
                if not self._running[tenant]:
                    del self._running[tenant]
                # Another piece of this tenant's work may start now.
                self._changed.notify()

    def _take(self) -> tuple[str, _Job] | None:
        """Wait for a piece of work that may start; return None when closed."""
        with self._changed:
            while not self._closed:
                tenant = self._next()
                if tenant is not None:
                    return tenant, self._begin(tenant)
                # Nothing wakes a thread when a budget has refilled.
                self._changed.wait(_LOOK_AGAIN_S if self._waiting else None)
            return None

    def _next(self) -> str | None:
        is_slow = self._budgets.is_slow
        slow_count = sum(count for tenant, count in self._running.items() if is_slow(tenant))
        able = [
            (self._running[tenant], self._served.get(tenant, 0), tenant)
            for tenant in self._waiting
            if self._running[tenant] < self._most
            and (slow_count < self._most_slow or not is_slow(tenant))
        ]
        return min(able)[2] if able else None

    def _begin(self, tenant: str) -> _Job:
        jobs = self._waiting[tenant]
        job = jobs.popleft()
        if not jobs:
            del self._waiting[tenant]
        self._running[tenant] += 1
        self._turn += 1
        self._served[tenant] = self._turn
        # Do not remember the turns of tenants without work for ever.
        if len(self._served) > 2 * (len(self._waiting) + len(self._running)) + 64:
            self._served = {
                name: turn
                for name, turn in self._served.items()
                if name in self._waiting or name in self._running
            }
        return job


class _Budgets:
    """The time that each tenant's work may take before the tenant counts as slow."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # The time when each tenant will have its whole budget again.
        self._whole_at: dict[str, float] = {}

    def charge(self, tenant: str, seconds: float) -> None:
        """Charge a tenant for a piece of work that took `seconds`."""
        if seconds <= _FREE_S:
            return
        now = self._clock()
        begins = max(now, self._whole_at.get(tenant, now))
        self._whole_at[tenant] = begins + (seconds - _FREE_S) / _BACK_S
        if len(self._whole_at) > _MOST_BUDGETS:
            self._whole_at = {name: at for name, at in self._whole_at.items() if at > now}

    def is_slow(self, tenant: str) -> bool:
        """Return whether the tenant has used up its budget."""
        now = self._clock()
        return (self._whole_at.get(tenant, now) - now) * _BACK_S > _BUDGET_S


def _fulfil(future: Future[_Result], work: Callable[[], _Result]) -> None:
    try:
        result = work()
    # The caller that waits for the future gets the exception.
    except BaseException as error:  # noqa: BLE001
        future.set_exception(error)
    else:
        future.set_result(result)
