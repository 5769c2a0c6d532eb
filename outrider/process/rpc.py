"""gRPC channels and servers with limits, keepalive, health, reflection and error details."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, NoReturn, TypeVar, cast

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from outrider.errors import DOMAIN, OutriderError, Reason, Retry
from outrider.process.credentials import (
    ClientCredentials,
    client_credentials,
    peer_of,
    server_credentials,
)
from outrider.process.reflection import serve_reflection
from outrider.process.roles import Role, check_call
from outrider.process.tls import Tls

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
MAX_STREAMS = 4096
# A peer's error travels on to callers in a call's metadata, of which gRPC allows 8 KiB.
_MAX_ERROR_BYTES = 1024
_MAX_RETRY_S = 86_400.0
_RETRY_KEY = "retry"
"""The key of the retry class in ErrorInfo.metadata."""

# Both ends notice within 12 s that the other has vanished: after 4 s without data they send a ping,
# and wait 8 s for its answer. gRPC also sends pings that measure the link. Their time-out is 60 s
# by default, and no other ping is sent while one is in flight, so theirs must be as short. The
# server must allow such pings: by default it answers pings more frequent than every 5 minutes with
# GOAWAY "too_many_pings".
_COMMON_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 4_000),
    ("grpc.keepalive_timeout_ms", 8_000),
    ("grpc.http2.ping_timeout_ms", 8_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
SERVER_OPTIONS: list[tuple[str, Any]] = [
    *_COMMON_OPTIONS,
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.max_concurrent_streams", MAX_STREAMS),
    ("grpc.so_reuseport", 0),
]
# A lost peer is redialled quickly. The "min" is how long one attempt may take: a connection to
# another region needs several round trips, so a short one would never succeed there.
CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    *_COMMON_OPTIONS,
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.enable_http_proxy", 0),
    # Otherwise a new channel would reuse an older one's connection to the same address, which may
    # be half open.
    ("grpc.use_local_subchannel_pool", 1),
]


def dial(
    address: str, tls: Tls | None = None, server: Role | None = Role.VERIFIER
) -> grpc.aio.Channel:
    """A channel to `host:port` or `unix:/path`, with mutual TLS if files are given.

    With TLS, the server's certificate must have the role `server`; for None it must have the name
    of the host. The files are read now; a channel keeps what they held. Raises
    OutriderError(INVALID_VALUE) if they are bad.
    """
    return channel(address, None if tls is None else client_credentials(address, tls, server))


def channel(address: str, credentials: ClientCredentials | None) -> grpc.aio.Channel:
    """A channel as of `dial`, from credentials that were read before; None means no TLS."""
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    options = [*CHANNEL_OPTIONS, *credentials.options]
    return grpc.aio.secure_channel(address, credentials.of_channel, options=options)


def status_of(error: OutriderError) -> status_pb2.Status:
    """The google.rpc.Status of an error.

    Its details are ErrorInfo, BadRequest if the error names a field, and RetryInfo if it has a
    delay after which a retry may succeed. The retry class is in ErrorInfo.metadata, for clients
    that do not know the reason.
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
    """The error that a peer reported with a call's status.

    `otherwise` is the reason for a failure without Outrider's error details.
    """
    error = OutriderError(otherwise, failure.details() or failure.code().name)
    try:
        # It reads only code, details and trailing metadata, which an AioRpcError has too.
        status = rpc_status.from_call(failure)  # type: ignore[arg-type]
        return error if status is None else _with_details(error, status)
    except (DecodeError, ValueError):
        # The details cannot be read, or contradict the call's status.
        return error


def error_in(serialized: bytes, otherwise: Reason = Reason.INTERNAL) -> OutriderError:
    """The error that a peer reported in a message, as a serialized google.rpc.Status.

    `otherwise` is the reason if the status has none of Outrider's error details.
    """
    try:
        status = status_pb2.Status.FromString(serialized)
        return _with_details(OutriderError(otherwise, _cut(status.message)), status)
    except DecodeError:
        return OutriderError(otherwise, "the peer reported an error that cannot be read")


def _with_details(error: OutriderError, status: status_pb2.Status) -> OutriderError:
    """The error with reason, metadata, field and delay from the status' details."""
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
    """Give the error the reason; one that only a later version knows has its class of retries."""
    metadata = dict(info.metadata)
    named = metadata.pop(_RETRY_KEY, "")
    if info.reason in Reason.__members__:
        error.reason = Reason[info.reason]
        error.retry = error.reason.kind.retry
        error.metadata = metadata
    elif named.upper() in Retry.__members__:
        error.retry = Retry[named.upper()]


def _cut(text: str) -> str:
    """The beginning of a text, as much as a call's metadata has room for."""
    return text.encode()[:_MAX_ERROR_BYTES].decode(errors="ignore")


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: OutriderError) -> NoReturn:
    """End the call with the error's status and details."""
    status = rpc_status.to_status(status_of(error))
    await context.abort_with_status(status)  # type: ignore[attr-defined]  # grpc-stubs lack it
    raise AssertionError("abort_with_status returned")


_Handler = TypeVar("_Handler", bound=Callable[..., Any])
_Message = TypeVar("_Message")


def unexpected(method: str) -> OutriderError:
    """Log the current exception, and return the error to answer with.

    The error does not hold the exception's text, which may contain a user's data.
    """
    log.exception("%s failed", method)
    return OutriderError(Reason.INTERNAL, f"{method} failed; the server's log has the reason")


def reports_errors(handler: _Handler) -> _Handler:
    """Decorate a servicer method so that a raised OutriderError becomes the call's status.

    The method answers with one message or a stream. Any other exception is logged and becomes
    INTERNAL, without its text, which may contain a user's data.
    """
    if inspect.isasyncgenfunction(handler):
        return cast(_Handler, _reports_errors_of_stream(handler))

    @functools.wraps(handler)
    async def unary(self: Any, request: Any, context: Any) -> Any:
        """Call the handler; abort the RPC with the status of its exception."""
        try:
            return await handler(self, request, context)
        except OutriderError as error:
            await abort(context, error)
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        # `unexpected` logs it.
        except Exception:  # noqa: BLE001
            await abort(context, unexpected(handler.__name__))

    return cast(_Handler, unary)


def _reports_errors_of_stream(handler: Callable[..., Any]) -> Callable[..., AsyncIterator[Any]]:
    @functools.wraps(handler)
    async def stream(self: Any, request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            async for response in handler(self, request, context):
                yield response
        except OutriderError as error:
            await abort(context, error)
        except (asyncio.CancelledError, grpc.aio.AbortError, GeneratorExit):
            raise
        # `unexpected` logs it.
        except Exception:  # noqa: BLE001
            await abort(context, unexpected(handler.__name__))

    return stream


_UNPARSABLE = object()
"""Takes the place of a request whose bytes are not a message of the method's type."""


class _Checks(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # only the stubs are generic
    """Refuses calls that the peer's role may not make, and requests that cannot be parsed.

    gRPC itself would log a traceback and answer UNKNOWN for the latter. They are answered with
    INVALID_ARGUMENT; the handler of a stream sees an OutriderError(MALFORMED_REQUEST) where it
    reads.
    """

    def __init__(self) -> None:
        self.has_roles = False
        """Whether every peer has TLS, and so a role."""

    def _admit(self, method: str, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        if self.has_roles:
            check_call(method, peer_of(context))

    async def intercept_service(
        self, continuation: Any, handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        """The method's handler, made to refuse such calls and requests."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        request_kind = "stream" if handler.request_streaming else "unary"
        response_kind = "stream" if handler.response_streaming else "unary"
        kind = f"{request_kind}_{response_kind}"
        behaviour = getattr(handler, kind)
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        check = _checked_stream if handler.request_streaming else _checked
        deserializer = functools.partial(_parsed, handler.request_deserializer)
        admit = functools.partial(self._admit, handler_call_details.method)
        refusing = _refusing(behaviour, admit, check)
        return make(refusing, deserializer, handler.response_serializer)


def _parsed(parse: Callable[[bytes], Any], data: bytes) -> Any:
    try:
        return parse(data)
    except DecodeError:
        return _UNPARSABLE


def _checked(request: Any) -> Any:
    if request is _UNPARSABLE:
        message = "the request cannot be parsed: it is not a message of the method's type"
        raise OutriderError(Reason.MALFORMED_REQUEST, message)
    return request


async def _checked_stream(requests: Any) -> AsyncIterator[Any]:
    async for request in requests:
        yield _checked(request)


def _refusing(
    behaviour: Callable[..., Any], admit: Callable[[Any], None], check: Callable[[Any], Any]
) -> Callable[..., Any]:
    """The handler behind `admit`, which takes the context, and with checked requests.

    It stays an asynchronous generator or a coroutine function: gRPC calls the two differently.
    """
    if inspect.isasyncgenfunction(behaviour):

        async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
            try:
                admit(context)
                async for response in behaviour(check(request), context):
                    yield response
            except OutriderError as error:
                await abort(context, error)

        return stream

    async def answer(request: Any, context: Any) -> Any:
        try:
            admit(context)
            return await behaviour(check(request), context)
        except OutriderError as error:
            await abort(context, error)

    return answer


def readable(message: _Message | None) -> _Message:
    """Return the peer's message.

    Raises OutriderError(PROTOCOL_VIOLATION) for None, which gRPC returns for bytes that it cannot
    parse.
    """
    if message is None:
        problem = "the peer sent bytes that are not a message of the method's type"
        raise OutriderError(Reason.PROTOCOL_VIOLATION, problem)
    return message


class Server:
    """A grpc.aio server with the standard health service and reflection.

    Usage: add servicers to `.grpc`, then `await start(address)`, `await set_serving(True)`, and at
    the end `await stop(grace_s)`. Every service starts as NOT_SERVING.
    """

    def __init__(
        self,
        *services: str,
        max_request_bytes: int = MAX_MESSAGE_BYTES,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),  # type: ignore[type-arg]  # as above
    ) -> None:
        """`services` are full names, for health and reflection. The interceptors run first."""
        self.services = services
        self.ports: list[int] = []
        options = [*SERVER_OPTIONS, ("grpc.max_receive_message_length", max_request_bytes)]
        self._checks = _Checks()
        self.grpc = grpc.aio.server(interceptors=[*interceptors, self._checks], options=options)
        # grpc-stubs lack it.
        self._health: Any = health.aio.HealthServicer()  # type: ignore[attr-defined]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        serve_reflection(self.grpc, (*services, health.SERVICE_NAME))

    async def start(self, *addresses: str, tls: Tls | None = None) -> list[int]:
        """Listen on each `host:port` or `unix:/path`, with TLS and roles if files are given.

        Returns the ports that were bound. Raises OutriderError(INVALID_VALUE) if an address cannot
        be bound or the files are bad.
        """
        await self.set_serving(False)
        self._checks.has_roles = tls is not None
        for address in addresses:
            try:
                self.ports.append(self._bind(address, tls))
            except RuntimeError as cause:
                message = f"cannot listen on {address}: {cause}"
                raise OutriderError(Reason.INVALID_VALUE, message, "listen") from cause
        await self.grpc.start()
        return self.ports

    def _bind(self, address: str, tls: Tls | None) -> int:
        if tls is None:
            return self.grpc.add_insecure_port(address)
        # Credentials whose files change serve a single port.
        return self.grpc.add_secure_port(address, server_credentials(tls))

    async def set_serving(self, serving: bool) -> None:
        """Set the health of every service and of the server as a whole (the empty name)."""
        status = health_pb2.HealthCheckResponse.NOT_SERVING
        if serving:
            status = health_pb2.HealthCheckResponse.SERVING
        for service in ("", *self.services):
            await self._health.set(service, status)

    async def stop(self, grace_s: float) -> None:
        """Report NOT_SERVING, let running calls finish for `grace_s`, then cancel them."""
        await self._health.enter_graceful_shutdown()
        await self.grpc.stop(grace_s)
