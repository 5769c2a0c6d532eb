"""Processes on this machine, which are started and stopped as in an experiment."""

from __future__ import annotations

import asyncio
import sys

import pytest

from outrider.errors import OutriderError
from outrider_bench.experiment.child import Child, Launch, check_cores, start
from tests.waiting import until


def _python(code: str, **more: object) -> Launch:
    return Launch("child", "", ("-c", code), sys.executable, **more)


async def _said(handle: Child, line: str) -> None:
    async def has_said() -> bool:
        return line in await handle.tail()

    await until(has_said)


async def test_stop_ends_a_process_by_sigterm_even_when_it_is_paused() -> None:
    handle = await start(_python("print('up', flush=True)\nimport time\ntime.sleep(60)"))
    await _said(handle, "up")
    await handle.pause()
    await handle.stop()
    assert not await handle.alive()
    assert (await handle.tail())[-1] == "ended with status -15"


async def test_a_paused_process_uses_no_cpu_time_until_it_is_resumed() -> None:
    handle = await start(_python("print('up', flush=True)\nwhile True: pass"))
    await _said(handle, "up")
    await handle.pause()
    await asyncio.sleep(0.05)
    before = await handle.cpu_s()
    await asyncio.sleep(0.3)
    assert await handle.cpu_s() == before
    await handle.resume()

    async def has_worked() -> bool:
        return await handle.cpu_s() > before

    await until(has_worked)
    await handle.kill()
    assert await handle.cpu_s() >= before


async def test_a_process_runs_on_the_cores_of_its_launch() -> None:
    code = "import os; print(sorted(os.sched_getaffinity(0)), flush=True)"
    handle = await start(_python(code, cores="0"))
    await _said(handle, "[0]")
    await handle.stop()


async def test_a_program_that_is_not_there_says_so_in_its_last_lines() -> None:
    try:
        handle = await start(Launch("child", "", (), "/nonexistent/program"))
    except FileNotFoundError:
        return  # where setpriv cannot be used, the start itself fails

    # The last lines may be read a little after the end is noticed.
    async def has_said_so() -> bool:
        ended = not await handle.alive()
        return ended and "/nonexistent/program" in "\n".join(await handle.tail())

    await until(has_said_so)


def test_cores_that_this_machine_lacks_are_refused_by_name() -> None:
    with pytest.raises(OutriderError, match=r"target\.cores.*not 0-999"):
        check_cores("target.cores", "0-999")
