"""Long-lived tasks: an exception is logged, and the work begins anew or its end is told."""

import asyncio

import pytest

from outrider.process.tasks import keep_running, watch


async def test_a_task_that_raises_is_logged_and_told_though_nobody_awaits_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    async def work() -> None:
        raise ZeroDivisionError("the reason")

    task = watch(work(), "the poll", told.set_result)
    assert isinstance(await told, ZeroDivisionError)
    assert task.done()
    assert "the poll ended unexpectedly" in caplog.text
    assert "the reason" in caplog.text


async def test_a_task_that_returns_or_is_cancelled_is_not_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told: list[BaseException] = []

    async def work() -> int:
        return 5

    assert await watch(work(), "one", told.append) == 5
    cancelled = watch(asyncio.sleep(60), "another", told.append)
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    assert not told
    assert not caplog.records


async def test_work_that_fails_begins_again_until_it_returns(
    caplog: pytest.LogCaptureFixture,
) -> None:
    attempts = 0

    async def work() -> None:
        nonlocal attempts
        attempts += 1
        if attempts < 4:
            raise OSError("not yet")

    await keep_running(work, "the writer", (0.001, 0.002))
    assert attempts == 4
    assert caplog.text.count("the writer failed; it begins again") == 3


async def test_work_that_is_cancelled_does_not_begin_again() -> None:
    begun = asyncio.Event()

    async def work() -> None:
        begun.set()
        await asyncio.sleep(60)

    task = keep_running(work, "the poll")
    await begun.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
