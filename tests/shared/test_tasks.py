"""Long-lived tasks log their exceptions, and restart or report their end."""

import asyncio

import pytest

from outrider.process.tasks import keep_running, watch


async def test_a_task_that_raises_is_logged_and_reported_without_an_await(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reported: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    async def work() -> None:
        raise ZeroDivisionError("the reason")

    task = watch(work(), "the poll", reported.set_result)
    assert isinstance(await reported, ZeroDivisionError)
    assert task.done()
    assert "the poll ended unexpectedly" in caplog.text
    assert "the reason" in caplog.text


async def test_failing_work_restarts_until_it_returns(
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
