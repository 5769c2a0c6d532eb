"""Runs long-lived asyncio tasks. Exceptions are logged at once, and end no work unnoticed."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

log = logging.getLogger(__name__)

_Result = TypeVar("_Result")

_BACKOFF_S = (0.1, 10.0)
_GOOD_S = 60.0


def watch(
    work: Coroutine[Any, Any, _Result],
    name: str,
    failed: Callable[[BaseException], object] | None = None,
) -> asyncio.Task[_Result]:
    """Start a task whose owner awaits it late or never.

    If it raises, the exception is logged at once and passed to `failed`. Cancellation is not a
    failure.
    """
    task = asyncio.create_task(work, name=name)

    def ended(task: asyncio.Task[_Result]) -> None:
        """Log the task's exception, if it has one, and pass it to `failed`."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        log.error("%s ended unexpectedly", name, exc_info=error)
        if failed is not None:
            failed(error)

    task.add_done_callback(ended)
    return task


async def until_first_end(*works: Awaitable[None]) -> None:
    """Run all `works` at once. When the first work ends, cancel all other works.

    Raises what the ended work raised.
    """
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            await task
    finally:
        for task in tasks:
            task.cancel()


def keep_running(
    work: Callable[[], Awaitable[None]], name: str, backoff_s: tuple[float, float] = _BACKOFF_S
) -> asyncio.Task[None]:
    """Start a task that calls `work`, and calls it again whenever it raises an exception.

    The task logs each exception, and ends when `work` returns. The delay before the next call
    doubles from the first to the second of `backoff_s`, and is reset if a call has run for a
    minute.
    """

    async def run() -> None:
        """Call `work` again after each exception, with a growing delay."""
        delay_s = backoff_s[0]
        while True:
            began = time.monotonic()
            try:
                return await work()
            # Any error is logged, and the work starts again.
            except Exception:
                if time.monotonic() - began > _GOOD_S:
                    delay_s = backoff_s[0]
                log.exception("%s failed; it begins again in %.1f s", name, delay_s)
            await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))
            delay_s = min(2 * delay_s, backoff_s[1])

    return watch(run(), name)
