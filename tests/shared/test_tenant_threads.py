"""Threads serve tenants in turns."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from outrider.process.workers.tenant_threads import TenantThreads


class Record:
    """A piece of work that records its start, and runs until it is released."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self._changed = threading.Condition()
        self._free: set[str] = set()

    def work(self, name: str) -> Callable[[], str]:
        def run() -> str:
            with self._changed:
                self.begun.append(name)
                self._changed.notify_all()
                self._changed.wait_for(lambda: name in self._free)
            return name

        return run

    def let_go(self, *names: str) -> None:
        with self._changed:
            self._free.update(names)
            self._changed.notify_all()

    def wait_for(self, count: int) -> list[str]:
        """Wait until `count` pieces of work have started; return their names in order."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.begun) >= count, 60)
            return list(self.begun)


@pytest.fixture
def threads() -> Iterator[TenantThreads]:
    found = TenantThreads(2, "turns")
    yield found
    found.close()


def test_a_tenant_never_has_all_threads(threads: TenantThreads) -> None:
    record = Record()
    bombs = [threads.submit("a", record.work(f"a{i}")) for i in range(5)]
    assert record.wait_for(1) == ["a0"]
    honest = threads.submit("b", record.work("b"))
    assert record.wait_for(2) == ["a0", "b"]
    record.let_go("b")
    assert honest.result(60) == "b"
    # The first tenant does not get the free thread.
    record.let_go("a0")
    assert bombs[0].result(60) == "a0"
    assert record.wait_for(3)[2:] == ["a1"]
    record.let_go(*(f"a{i}" for i in range(5)))
    assert [bomb.result(60) for bomb in bombs] == [f"a{i}" for i in range(5)]


def test_tenants_take_turns_however_much_each_has_queued(threads: TenantThreads) -> None:
    record = Record()
    threads.submit("a", record.work("a0"))
    threads.submit("b", record.work("b0"))
    record.wait_for(2)
    for name in ("a1", "a2", "b1", "b2", "c1", "c2"):
        threads.submit(name[0], record.work(name))
    record.let_go("a0")
    # Tenant c has never been served, and tenant a's work no longer runs.
    assert record.wait_for(3)[2:] == ["c1"]
    record.let_go("b0")
    assert record.wait_for(4)[3:] == ["a1"]
    record.let_go("c1")
    assert record.wait_for(5)[4:] == ["b1"]
    record.let_go("a1", "a2", "b1", "b2", "c2")


def test_work_that_nobody_waits_for_does_not_begin(threads: TenantThreads) -> None:
    record = Record()
    first = threads.submit("a", record.work("a0"))
    gone = threads.submit("a", record.work("gone"))
    record.wait_for(1)
    assert gone.cancel()
    last = threads.submit("a", record.work("a2"))
    record.let_go("a0", "a2")
    assert [first.result(60), last.result(60)] == ["a0", "a2"]
    assert record.begun == ["a0", "a2"]


def settle(threads: TenantThreads, *tenants: str) -> None:
    """Wait until each tenant's last work is counted; a tenant's work runs one piece at a time."""
    for tenant in tenants:
        threads.submit(tenant, lambda: None).result(60)


def test_tenants_that_used_up_their_budgets_leave_threads_to_the_others() -> None:
    now = 0.0
    threads = TenantThreads(4, "budgets", each=1, spare=2, clock=lambda: now)
    record = Record()
    slow = ("a", "b", "c")
    first = [threads.submit(name, record.work(f"{name}0")) for name in slow]
    record.wait_for(3)
    now = 2.2
    record.let_go("a0", "b0", "c0")
    assert [work.result(60) for work in first] == ["a0", "b0", "c0"]
    settle(threads, *slow)
    later = [threads.submit(name, record.work(f"{name}1")) for name in slow]
    assert set(record.wait_for(5)[3:]) < {"a1", "b1", "c1"}
    # Two threads are left, and the third slow tenant gets neither of them.
    honest = [threads.submit(name, record.work(name)) for name in ("x", "y")]
    assert set(record.wait_for(7)[5:]) == {"x", "y"}
    record.let_go("x", "y")
    assert [work.result(60) for work in honest] == ["x", "y"]
    settle(threads, "x", "y")
    assert len(record.begun) == 7
    # The budgets come back.
    now = 4.0
    record.wait_for(8)
    record.let_go("a1", "b1", "c1")
    assert [work.result(60) for work in later] == ["a1", "b1", "c1"]
    threads.close()


def test_work_that_is_quick_uses_up_no_budget() -> None:
    now = 0.0

    def work(seconds: float) -> None:
        nonlocal now
        now += seconds

    threads = TenantThreads(2, "quick", each=1, spare=1, clock=lambda: now)
    threads.submit("slow", partial(work, 500.0)).result(60)
    for _ in range(100):
        threads.submit("quick", partial(work, 0.09)).result(60)
    settle(threads, "slow", "quick")
    record = Record()
    blocker = threads.submit("slow", record.work("slow"))
    record.wait_for(1)
    threads.submit("quick", record.work("quick"))
    assert record.wait_for(2) == ["slow", "quick"]
    record.let_go("slow", "quick")
    assert blocker.result(60) == "slow"
    threads.close()
