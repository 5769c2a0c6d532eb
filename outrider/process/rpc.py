"""gRPC as every process of Outrider uses it: bounded, kept alive, with health, reflection and google.rpc error details."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any, NoReturn, TypeVar, cast

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2
from grpc_status import rpc_status

from outrider.errors import DOMAIN, OutriderError, Reason

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
MAX_STREAMS = 4096
_REFLECTION_V1 = "grpc.reflection.v1.ServerReflection"

# Both ends notice within 12 s that the other has vanished: after 4 s in which nothing came they send a ping, and wait 8 s for
# its answer. gRPC sends other pings too, to measure the link. Their time-out is 60 s by default, and while one of them is under
# way no other is sent, so it must be as short. The server must allow such pings: by default it answers pings more frequent than
# every 5 minutes with GOAWAY "too_many_pings".
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
# A lost peer is redialled quickly: these are processes on one host or in one rack, not clients across the internet.
CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    *_COMMON_OPTIONS,
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.enable_http_proxy", 0),
    # Otherwise a new channel would use the connection of an older one to the same address, which may be half open.
    ("grpc.use_local_subchannel_pool", 1),
]


def dial(address: str, credentials: grpc.ChannelCredentials | None = None) -> grpc.aio.Channel:
    """A channel to `host:port` or `unix:/path`, with TLS where credentials are given."""
    if credentials is not None:
        return grpc.aio.secure_channel(address, credentials, options=CHANNEL_OPTIONS)
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)


def status_of(error: OutriderError) -> status_pb2.Status:
    """The google.rpc.Status of an error: ErrorInfo always, BadRequest when a field is at fault, RetryInfo when waiting helps."""
    details: list[Any] = [
        error_details_pb2.ErrorInfo(
            reason=error.reason.name, domain=DOMAIN, metadata=error.metadata
        )
    ]
    if error.field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=error.message
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    status = status_pb2.Status(
        code=code_pb2.Code.Value(error.reason.kind.status), message=error.message
    )
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return status


def error_of(
    failure: grpc.aio.AioRpcError, otherwise: Reason = Reason.VERIFIER_UNAVAILABLE
) -> OutriderError:
    """The error that a peer reported; `otherwise` is the reason for a failure that no Outrider process described."""
    error = OutriderError(otherwise, failure.details() or failure.code().name)
    try:
        status = rpc_status.from_call(failure)  # type: ignore[arg-type]  # reads code, details and trailing metadata alone
        return error if status is None else _with_details(error, status)
    except (DecodeError, ValueError):
        # Details that cannot be read, or that contradict the call's status.
        return error


def error_in(serialized: bytes, otherwise: Reason = Reason.INTERNAL) -> OutriderError:
    """The error that a peer reported in a message, as a serialized google.rpc.Status; `otherwise` as in `error_of`."""
    try:
        status = status_pb2.Status.FromString(serialized)
        return _with_details(OutriderError(otherwise, status.message), status)
    except DecodeError:
        return OutriderError(otherwise, "the peer reported an error that cannot be read")


def _with_details(error: OutriderError, status: status_pb2.Status) -> OutriderError:
    for packed in status.details:
        info, bad, retry = (
            error_details_pb2.ErrorInfo(),
            error_details_pb2.BadRequest(),
            error_details_pb2.RetryInfo(),
        )
        if packed.Unpack(info) and info.domain == DOMAIN and info.reason in Reason.__members__:
            error.reason, error.metadata = Reason[info.reason], dict(info.metadata)
        elif packed.Unpack(bad) and bad.field_violations:
            error.field = bad.field_violations[0].field
        elif packed.Unpack(retry):
            error.retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
    return error


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: OutriderError) -> NoReturn:
    """End the call with the error's status and details."""
    await context.abort_with_status(rpc_status.to_status(status_of(error)))  # type: ignore[attr-defined]  # grpc-stubs lack it
    raise AssertionError("abort_with_status returned")


_Handler = TypeVar("_Handler", bound=Callable[..., Any])
_Message = TypeVar("_Message")


def unexpected(method: str) -> OutriderError:
    """Log the exception that is being handled, and what to answer: not its text, which may hold a user's data."""
    log.exception("%s failed", method)
    return OutriderError(Reason.INTERNAL, f"{method} failed; the server's log has the reason")


def reports_errors(handler: _Handler) -> _Handler:
    """Decorate a servicer method, unary or streaming, so that a raised OutriderError becomes the call's status.

    Anything else that is raised is logged and becomes INTERNAL without its text, which may hold a user's data.
    """
    if inspect.isasyncgenfunction(handler):

        @functools.wraps(handler)
        async def stream(self: Any, request: Any, context: Any) -> AsyncIterator[Any]:
            try:
                async for response in handler(self, request, context):
                    yield response
            except OutriderError as error:
                await abort(context, error)
            except (asyncio.CancelledError, grpc.aio.AbortError, GeneratorExit):
                raise
            except Exception:  # noqa: BLE001  # logged, and answered with INTERNAL
                await abort(context, unexpected(handler.__name__))

        return cast(_Handler, stream)

    @functools.wraps(handler)
    async def unary(self: Any, request: Any, context: Any) -> Any:
        try:
            return await handler(self, request, context)
        except OutriderError as error:
            await abort(context, error)
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except Exception:  # noqa: BLE001  # logged, and answered with INTERNAL
            await abort(context, unexpected(handler.__name__))

    return cast(_Handler, unary)


class _Unreadable:
    """Stands for a request that is no message of its type, until its handler is asked for an answer."""


_UNREADABLE = _Unreadable()


class _RefusesUnreadable(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs alone
    """Answers what cannot be parsed with INVALID_ARGUMENT: gRPC itself logs a traceback and says UNKNOWN.

    To a handler of a stream it is an OutriderError(MALFORMED_REQUEST), raised where the handler reads.
    """

    async def intercept_service(
        self, continuation: Any, handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        kind = ("stream" if handler.request_streaming else "unary") + (
            "_stream" if handler.response_streaming else "_unary"
        )
        behaviour = getattr(handler, kind)
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        readable = _readable_all if handler.request_streaming else _readable
        deserializer = functools.partial(_parsed, handler.request_deserializer)
        return make(_refusing(behaviour, readable), deserializer, handler.response_serializer)


def _parsed(parse: Callable[[bytes], Any], data: bytes) -> Any:
    try:
        return parse(data)
    except DecodeError:
        return _UNREADABLE


def _readable(request: Any) -> Any:
    if request is _UNREADABLE:
        raise OutriderError(
            Reason.MALFORMED_REQUEST,
            "the request cannot be parsed: it is no message of the method's type",
        )
    return request


async def _readable_all(requests: Any) -> AsyncIterator[Any]:
    async for request in requests:
        yield _readable(request)


def _refusing(behaviour: Callable[..., Any], readable: Callable[[Any], Any]) -> Callable[..., Any]:
    """The handler, of the same kind; gRPC looks at that to know how to call it."""
    if inspect.isasyncgenfunction(behaviour):

        async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
            try:
                async for response in behaviour(readable(request), context):
                    yield response
            except OutriderError as error:
                await abort(context, error)

        return stream

    async def answer(request: Any, context: Any) -> Any:
        try:
            return await behaviour(readable(request), context)
        except OutriderError as error:
            await abort(context, error)

    return answer


def readable(message: _Message | None) -> _Message:
    """The peer's message; raises OutriderError(PROTOCOL_VIOLATION) for None, which gRPC returns for bytes that it cannot parse."""
    if message is None:
        raise OutriderError(
            Reason.PROTOCOL_VIOLATION,
            "the peer sent what cannot be parsed as a message of the method's type",
        )
    return message


class Server:
    """A grpc.aio server with the standard health service and reflection; every service starts as NOT_SERVING.

    Usage: add servicers to `.grpc`, then `await start(address)`, `await set_serving(True)`, and at the end `await stop(grace_s)`.
    """

    def __init__(self, *services: str, max_request_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self.services = services
        self.ports: list[int] = []
        options = [*SERVER_OPTIONS, ("grpc.max_receive_message_length", max_request_bytes)]
        self.grpc = grpc.aio.server(interceptors=[_RefusesUnreadable()], options=options)
        self._health: Any = health.aio.HealthServicer()  # type: ignore[attr-defined]  # grpc-stubs lack it
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        self._enable_reflection()

    def _enable_reflection(self) -> None:
        """Under both of its names; the messages are the same, and grpcio-reflection has the older one alone."""
        names = (*self.services, health.SERVICE_NAME, reflection.SERVICE_NAME, _REFLECTION_V1)
        reflection.enable_server_reflection(names, self.grpc)
        servicer = reflection.aio.ReflectionServicer(names)  # type: ignore[attr-defined]  # grpc-stubs lack it
        handler = grpc.stream_stream_rpc_method_handler(
            servicer.ServerReflectionInfo,
            reflection_pb2.ServerReflectionRequest.FromString,
            reflection_pb2.ServerReflectionResponse.SerializeToString,
        )
        method = grpc.method_handlers_generic_handler(
            _REFLECTION_V1, {"ServerReflectionInfo": handler}
        )
        self.grpc.add_generic_rpc_handlers((method,))

    async def start(
        self, *addresses: str, credentials: grpc.ServerCredentials | None = None
    ) -> list[int]:
        """Listen on each `host:port` or `unix:/path`, with TLS where credentials are given; the ports that were bound (for port 0).

        Raises OutriderError(INVALID_VALUE) when an address cannot be bound.
        """
        await self.set_serving(False)
        for address in addresses:
            try:
                self.ports.append(self._bind(address, credentials))
            except RuntimeError as cause:
                raise OutriderError(
                    Reason.INVALID_VALUE, f"cannot listen on {address}: {cause}", "listen"
                ) from cause
        await self.grpc.start()
        return self.ports

    def _bind(self, address: str, credentials: grpc.ServerCredentials | None) -> int:
        if credentials is not None:
            return self.grpc.add_secure_port(address, credentials)
        return self.grpc.add_insecure_port(address)

    async def set_serving(self, serving: bool) -> None:
        """Set the health of every service and of the server as a whole (the empty name)."""
        status = (
            health_pb2.HealthCheckResponse.SERVING
            if serving
            else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        for service in ("", *self.services):
            await self._health.set(service, status)

    async def stop(self, grace_s: float) -> None:
        """Say NOT_SERVING, let running calls finish for `grace_s`, then cancel them."""
        await self._health.enter_graceful_shutdown()
        await self.grpc.stop(grace_s)
