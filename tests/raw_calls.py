"""Calls of any RPC with raw bytes, for tests with hostile messages."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from google.protobuf.descriptor import FileDescriptor, MethodDescriptor

from outrider.errors import OutriderError, Reason
from outrider.process.network import rpc_errors

_OURS = "/outrider."
_UNCLEAR = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)


def methods(*files: FileDescriptor) -> list[MethodDescriptor]:
    """Return all methods of all services in the files of protos."""
    return [
        method
        for file in files
        for service in file.services_by_name.values()
        for method in service.methods
    ]


def path(method: MethodDescriptor) -> str:
    """Return the method's path in HTTP/2."""
    return f"/{method.containing_service.full_name}/{method.name}"


def check_details(failure: grpc.aio.AioRpcError) -> OutriderError:
    """Return the error of a failed call to our services; its details must agree with its status."""
    # `otherwise` counts only if the error has no details.
    error = rpc_errors.error_of(failure, otherwise=Reason.ROUTE_NOT_FOUND)
    again = rpc_errors.error_of(failure, otherwise=Reason.METHOD_NOT_ALLOWED)
    assert error.reason is again.reason, failure
    assert error.reason.kind.status == failure.code().name, failure
    return error


def check_clear(failure: grpc.aio.AioRpcError, *, is_ours: bool = True) -> None:
    """Check that the status, and in our services the details, say why the call failed."""
    assert failure.code() not in _UNCLEAR, failure
    if is_ours:
        error = check_details(failure)
        assert error.field or error.reason is not Reason.INVALID_VALUE, failure


async def call_raw(
    channel: grpc.aio.Channel, method: MethodDescriptor, requests: list[bytes]
) -> None:
    """Send raw messages and read to the end. If the call fails, its status must be clear."""
    call: Any = channel.stream_stream(path(method), None, None)(iter(requests))
    try:
        async with asyncio.timeout(20):
            async for _ in call:
                pass
    except grpc.aio.AioRpcError as failure:
        check_clear(failure, is_ours=path(method).startswith(_OURS))
