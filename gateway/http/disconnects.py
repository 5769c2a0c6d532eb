"""Stops the work for a client that disconnects before its answer streams.

`gateway.http.streaming.EventStream` does the same for an answer that streams.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable
from typing import Any, TypeVar

from fastapi import Request

from outrider.errors import OutriderError, Reason

_Result = TypeVar("_Result")


async def until_done_or_disconnected(request: Request, work: Awaitable[_Result]) -> _Result:
    """Return the result of `work`.

    If the client disconnects first, cancel the work and raise CLIENT_GONE.
    """
    task = asyncio.ensure_future(work)
    disconnected = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise client_gone_error()
        return task.result()
    finally:
        task.cancel()
        disconnected.cancel()
        await asyncio.gather(task, disconnected, return_exceptions=True)


async def until_begun_or_disconnected(
    request: Request, first: asyncio.Future[_Result], most_s: float
) -> None:
    """Wait at most `most_s` for the first part of an answer.

    Raises the error of `first`, or CLIENT_GONE if the client disconnects before `first` is done.
    """
    disconnected = asyncio.ensure_future(_disconnected(request))
    both: set[asyncio.Future[Any]] = {first, disconnected}
    try:
        timeout_s = None if most_s == math.inf else most_s
        await asyncio.wait(both, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if first.done():
            first.result()
        elif disconnected.done():
            raise client_gone_error()
    finally:
        await cancel_and_wait(disconnected)


async def cancel_and_wait(work: asyncio.Future[Any]) -> None:
    """Cancel the work, wait for its end, and ignore its error."""
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)


def client_gone_error() -> OutriderError:
    """Return the error of an answer whose client disconnected before its end."""
    return OutriderError(Reason.CLIENT_GONE, "the client hung up before its answer was complete")


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
