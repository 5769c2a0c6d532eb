"""The processes of a stack are watched until they are ready, and can be ended and started again."""

from __future__ import annotations

import sys

import pytest

from outrider_bench.experiment.child import Launch
from outrider_bench.experiment.processes import Processes, StackFailed

_SLEEP = "print('up', flush=True)\nimport time\ntime.sleep(60)"


def _python(name: str, code: str) -> Launch:
    return Launch(name, "", ("-c", code), sys.executable)


async def _never() -> bool:
    return False


async def test_a_process_that_ends_early_is_an_error_with_its_last_lines() -> None:
    processes = Processes()
    await processes.start(_python("fine", _SLEEP))
    await processes.start(_python("broken", "print('no model here'); raise SystemExit(3)"))
    with pytest.raises(StackFailed, match=r"broken ended\n.*no model here\n.*ended with status 3"):
        await processes.until("the stack", _never)
    await processes.stop()


async def test_a_process_that_was_ended_is_not_missed_and_can_be_started_again() -> None:
    processes = Processes()
    await processes.start(_python("child", _SLEEP))
    first = processes.child("child")
    await processes.end("child")
    await processes.check()
    assert not await first.alive()
    await processes.again("child")
    second = processes.child("child")
    assert second is not first
    await processes.again("child")
    assert processes.child("child") is second, "a child that runs is left alone"
    await processes.stop()
    assert not await second.alive()
