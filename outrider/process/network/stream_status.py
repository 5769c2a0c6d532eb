"""Bidirectional calls that keep the status with which the peer ended them.

Where a write fails because the call has ended, grpc.aio sets the status "Internal error from Core",
and drops the peer's status, which arrives a moment later (grpc#36066). The peer's reason for a
refusal and its rule for retries would be lost.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import grpc

# The peer's status follows a failed write at once, unless messages before it wait to be read.
STATUS_WAIT_S = 5.0
"""The seconds that a failed write waits for the status of its call."""
_UNREAD = "the peer ended the call; its status follows the messages that are not read yet"


def keep_status(channel: grpc.aio.Channel) -> grpc.aio.Channel:
    """Let bidirectional calls of this channel keep their peer's status; return the channel.

    A write to a call that has ended then raises AioRpcError with that status, or returns if the
    status is OK. The write raises UNAVAILABLE if no status comes within STATUS_WAIT_S, because
    earlier messages are unread; reading these messages gives the status.
    """
    make: Any = channel.stream_stream

    def stream_stream(*args: Any, **settings: Any) -> Any:
        begin = make(*args, **settings)

        def call(*requests: Any, **options: Any) -> Any:
            begun = begin(*requests, **options)
            # Nothing has been written yet: the call begins at the next turn of the event loop.
            begun._cython_call = _PatientCall(begun._cython_call)
            return begun

        return call

    channel.stream_stream = stream_stream  # type: ignore[method-assign]
    return channel


class _PatientCall:
    """A call of gRPC's core in which a failed write waits for the peer's status."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    async def send_serialized_message(self, message: bytes) -> None:
        """Send a message. Raises the core's error, after which grpc.aio raises the status."""
        try:
            await self._call.send_serialized_message(message)
        except grpc.aio.InternalError:
            try:
                async with asyncio.timeout(STATUS_WAIT_S):
                    await self._call.status()
            except TimeoutError:
                none = grpc.aio.Metadata()
                code = grpc.StatusCode.UNAVAILABLE
                raise grpc.aio.AioRpcError(code, none, none, _UNREAD, None) from None
            raise

    async def send_receive_close(self) -> None:
        """Half-close. Does nothing if the call has ended, since grpc.aio would cancel the call."""
        with suppress(grpc.aio.InternalError):
            await self._call.send_receive_close()

    def set_internal_error(self, error: str) -> None:
        """Do not replace the peer's status, as grpc.aio would after a failed write."""
