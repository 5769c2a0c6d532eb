"""Work in a worker process ends at its limits, and the next work begins at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.process.workers.pool import (
    OutOfMemory,
    OutOfTime,
    Worker,
    WorkerError,
    WorkerLost,
    WorkerSource,
)
from outrider.process.workers.worker import SECONDS

LONG_S = 60.0
MEMORY = 256 * 2**20


@pytest.fixture(scope="module")
def source() -> Iterator[WorkerSource]:
    found = WorkerSource("tests.shared.worker_handlers:make", {"prefix": "> "}, memory_bytes=MEMORY)
    yield found
    found.close()


@pytest.fixture
def worker(source: WorkerSource) -> Iterator[Worker]:
    found = Worker(source)
    yield found
    found.kill()


def is_there(pid: int) -> bool:
    """Return whether a process has not ended. A zombie has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ends(pid: int) -> bool:
    """Return whether a process ends soon."""
    until = time.monotonic() + LONG_S
    while is_there(pid) and time.monotonic() < until:
        time.sleep(0.01)
    return not is_there(pid)


def test_a_worker_answers_one_request_after_the_other(worker: Worker) -> None:
    assert worker.call(b"say one", LONG_S) == b"> one"
    assert worker.call(b"say two", LONG_S) == b"> two"
    assert worker.call(b"pid", LONG_S) == worker.call(b"pid", LONG_S)


def test_a_worker_that_hangs_is_killed_and_replaced(worker: Worker) -> None:
    pid = int(worker.call(b"pid", LONG_S).split()[0])
    with pytest.raises(OutOfTime, match=r"longer than 0\.2 s"):
        worker.call(b"hang", 0.2)
    assert not is_there(pid)
    assert int(worker.call(b"pid", LONG_S).split()[0]) != pid


def test_only_a_workers_processor_time_counts(worker: Worker) -> None:
    """On a busy machine a worker waits for a core, whatever the request."""
    assert worker.call(b"sleep 0.4", 0.2) == b""


def test_a_worker_that_waits_for_ever_is_killed_too(worker: Worker) -> None:
    pid = int(worker.call(b"pid", LONG_S).split()[0])
    with pytest.raises(OutOfTime):
        worker.call(b"sleep 600", 0.02)
    assert not is_there(pid)


def test_a_hanging_worker_delays_no_other(source: WorkerSource, worker: Worker) -> None:
    """If the other worker had to wait, its call would take as long as the hanging worker's."""
    worker.start()
    worker._forked[1].send_bytes(SECONDS.pack(LONG_S) + b"hang")
    other = Worker(source)
    assert other.call(b"say there", LONG_S) == b"> there"
    other.kill()


def test_a_worker_gets_no_more_memory_than_its_limit(worker: Worker) -> None:
    worker.call(b"take %d" % (MEMORY // 2), LONG_S)
    with pytest.raises(OutOfMemory, match="256 MiB"):
        worker.call(b"take %d" % MEMORY, LONG_S)
    # The memory that the worker held is free again.
    worker.call(b"take %d" % (MEMORY // 2), LONG_S)


def test_a_worker_that_fails_or_crashes_is_replaced(worker: Worker) -> None:
    with pytest.raises(WorkerError, match="ValueError: no such thing"):
        worker.call(b"fail no such thing", LONG_S)
    with pytest.raises(WorkerError, match="crashed"):
        worker.call(b"end SIGABRT /dev/null", LONG_S)
    assert worker.call(b"say here", LONG_S) == b"> here"


def test_a_killed_worker_is_replaced_within_the_call(worker: Worker) -> None:
    """Something other than the request kills the worker, while it is idle or at work."""
    pid = int(worker.call(b"pid", LONG_S).split()[0])
    os.kill(pid, signal.SIGKILL)
    assert worker.call(b"say here", LONG_S) == b"> here"
    pid = int(worker.call(b"pid", LONG_S).split()[0])
    killer = threading.Timer(0.2, os.kill, (pid, signal.SIGTERM))
    killer.start()
    assert worker.call(b"sleep 0.5", LONG_S) == b""
    killer.join()
    assert int(worker.call(b"pid", LONG_S).split()[0]) != pid


@pytest.mark.parametrize(
    ("ended_by", "error", "calls"),
    [("SIGKILL", WorkerLost, 2), ("SIGTERM", WorkerLost, 2), ("SIGSEGV", OutOfMemory, 1)],
)
def test_a_worker_is_replaced_once_and_only_if_it_did_not_crash(
    ended_by: str, error: type[WorkerError], calls: int, worker: Worker, tmp_path: Path
) -> None:
    with pytest.raises(error, match=r"killed|crashed"):
        worker.call(f"end {ended_by} {tmp_path / 'calls'}".encode(), LONG_S)
    assert (tmp_path / "calls").read_text() == "x" * calls
    assert worker.call(b"say here", LONG_S) == b"> here"


def test_the_process_that_forks_is_replaced_too(source: WorkerSource, worker: Worker) -> None:
    first, parent = map(int, worker.call(b"pid", LONG_S).split())
    os.kill(parent, signal.SIGKILL)
    assert worker.call(b"say again", LONG_S) == b"> again"
    assert ends(first)


_PARENT = """
import sys
from outrider.process.workers.pool import Worker, WorkerSource
worker = Worker(WorkerSource("tests.shared.worker_handlers:make", {"prefix": ""}))
print(worker.call(b"pid", 60.0).decode(), flush=True)
worker.call(b"hang", 600.0)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs a signal at the parent's death")
def test_no_worker_outlives_the_process_that_uses_it() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT], stdout=subprocess.PIPE, env=environment
    )
    assert parent.stdout is not None
    pids = [int(text) for text in parent.stdout.readline().split()]
    assert len(pids) == 2
    assert all(map(is_there, pids))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert all(map(ends, pids))
