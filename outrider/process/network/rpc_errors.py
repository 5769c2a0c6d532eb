"""Converts errors to gRPC statuses with details, and back."""

from __future__ import annotations

import logging
from typing import Any, NoReturn, TypeVar

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from outrider.errors import DOMAIN, OutriderError, Reason, Retry

log = logging.getLogger(__name__)

# A peer's error is passed on to callers in a call's metadata, of which gRPC allows 8 KiB.
_MAX_ERROR_BYTES = 1024
_MAX_RETRY_S = 86_400.0
_RETRY_KEY = "retry"
"""The key of the retry class in ErrorInfo.metadata."""


def status_of(error: OutriderError) -> status_pb2.Status:
    """Return the google.rpc.Status of an error.

    The status has the details ErrorInfo, BadRequest if the error names a field, and RetryInfo if it
    has a delay after which a retry may succeed. The retry class is in ErrorInfo.metadata, for
    clients that do not know the reason.
    """
    info = error_details_pb2.ErrorInfo(
        reason=error.reason.name,
        domain=DOMAIN,
        metadata=error.metadata | {_RETRY_KEY: error.retry.name.lower()},
    )
    details: list[Any] = [info]
    if error.field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=error.message
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    code = code_pb2.Code.Value(error.reason.kind.status)
    status = status_pb2.Status(code=code, message=error.message)
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return status


def error_of(
    failure: grpc.aio.AioRpcError, otherwise: Reason = Reason.VERIFIER_UNAVAILABLE
) -> OutriderError:
    """Return the error that a peer reported with a call's status.

    `otherwise` is the reason for a failure without Outrider's error details.
    """
    error = OutriderError(otherwise, failure.details() or failure.code().name)
    try:
        # `from_call` reads only code, details and trailing metadata, which an AioRpcError has too.
        status = rpc_status.from_call(failure)  # type: ignore[arg-type]
        return error if status is None else _with_details(error, status)
    except (DecodeError, ValueError):
        # The details cannot be read, or contradict the call's status.
        return error


def error_in(serialized: bytes, otherwise: Reason = Reason.INTERNAL) -> OutriderError:
    """Return the error that a peer reported in a message, as a serialized google.rpc.Status.

    `otherwise` is the reason if the status has none of Outrider's error details.
    """
    try:
        status = status_pb2.Status.FromString(serialized)
        return _with_details(OutriderError(otherwise, _cut(status.message)), status)
    except DecodeError:
        return OutriderError(otherwise, "the peer reported an error that cannot be read")


def _with_details(error: OutriderError, status: status_pb2.Status) -> OutriderError:
    """Return the error, with reason, metadata, field and delay from the status' details."""
    info = error_details_pb2.ErrorInfo()
    bad = error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    for packed in status.details:
        if packed.Unpack(info) and info.domain == DOMAIN:
            _describe(error, info)
        elif packed.Unpack(bad) and bad.field_violations:
            error.field = _cut(bad.field_violations[0].field)
        elif packed.Unpack(retry):
            delay_s = retry.retry_delay.ToNanoseconds() / 1e9
            error.retry_after_s = min(max(delay_s, 0.0), _MAX_RETRY_S)
    return error


def _describe(error: OutriderError, info: error_details_pb2.ErrorInfo) -> None:
    """Take the peer's reason; if this version does not know it, take only its retry class."""
    metadata = dict(info.metadata)
    named = metadata.pop(_RETRY_KEY, "")
    if info.reason in Reason.__members__:
        error.reason = Reason[info.reason]
        error.retry = error.reason.kind.retry
        error.metadata = metadata
    elif named.upper() in Retry.__members__:
        error.retry = Retry[named.upper()]


def _cut(text: str) -> str:
    """Return the text's first 1024 bytes, so that it fits into a call's metadata."""
    return text.encode()[:_MAX_ERROR_BYTES].decode(errors="ignore")


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: OutriderError) -> NoReturn:
    """End the call with the error's status and details."""
    status = rpc_status.to_status(status_of(error))
    await context.abort_with_status(status)  # type: ignore[attr-defined]  # grpc-stubs lack it
    raise AssertionError("abort_with_status returned")


_Message = TypeVar("_Message")


def unexpected(method: str) -> OutriderError:
    """Log the current exception, and return the error for the caller.

    The error does not hold the exception's text, which may contain a user's data.
    """
    log.exception("%s failed", method)
    return OutriderError(Reason.INTERNAL, f"{method} failed; the server's log has the reason")


def readable(message: _Message | None) -> _Message:
    """Return the peer's message.

    Raises OutriderError(PROTOCOL_VIOLATION) for None, which gRPC returns for bytes that it cannot
    parse.
    """
    if message is None:
        problem = "the peer sent bytes that are not a message of the method's type"
        raise OutriderError(Reason.PROTOCOL_VIOLATION, problem)
    return message
