"""GenerationService for browsers on the HTTP port, over the Connect protocol and gRPC-Web."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from connectrpc.code import Code
from connectrpc.codec import Codec
from connectrpc.compat import google_protobuf_binary_codec, google_protobuf_json_codec
from connectrpc.errors import ConnectError, ErrorDetail
from connectrpc.interceptor import MetadataInterceptor
from connectrpc.method import IdempotencyLevel, MethodInfo, StreamType
from connectrpc.request import RequestContext
from connectrpc.server import ConnectASGIApplication, Endpoint
from google.protobuf.json_format import ParseError
from google.protobuf.message import DecodeError
from protobuf.wkt import Any as PackedDetail
from starlette.routing import Match, Route
from starlette.types import Message, Receive, Scope, Send

from gateway import access_log
from gateway.http.ingress.json_size import check_size
from gateway.rpc.servicer import MAX_MESSAGE_BYTES, SERVICE, GenerationServicer
from outrider.errors import OutriderError, Reason
from outrider.process.network import rpc_errors
from outrider.v1.generation_pb2 import GenerateTextRequest, GenerateTextResponse

PATH = f"/{SERVICE}/GenerateText"
ERROR_HEADERS = ("Grpc-Status", "Grpc-Message", "Grpc-Status-Details-Bin")
"""The headers in which gRPC-Web reports a call that failed before its first response."""
_SHOWN_CHARACTERS = 300
MAX_JSON_VALUES = 65_536
"""The maximum number of values of a request in JSON.

It is lower than the limit of other bodies, since building the message takes longer than parsing the
JSON.
"""
_CONTENT_TYPES = (
    "application/connect+json",
    "application/connect+proto",
    "application/grpc-web",
    "application/grpc-web+proto",
)
_METHOD = MethodInfo(
    name="GenerateText",
    service_name=SERVICE,
    input=GenerateTextRequest,
    output=GenerateTextResponse,
    idempotency_level=IdempotencyLevel.UNKNOWN,
    stream_type=StreamType.SERVER_STREAM,
)
_Context = RequestContext[GenerateTextRequest, GenerateTextResponse]
_BY_CODE = {
    Code.DEADLINE_EXCEEDED: Reason.DEADLINE_EXCEEDED,
    Code.CANCELED: Reason.CLIENT_GONE,
    Code.UNKNOWN: Reason.INTERNAL,
}
"""The reasons of the library's own errors. Errors with other codes, except RESOURCE_EXHAUSTED, are
faults of the request's frames.
"""
_UNKNOWN_NAME = re.compile(r'has no field named "([^"]*)" at "GenerateTextRequest\.?([^"]*)"')
"""What protobuf's JSON parser says about an unknown field: its name and place."""


def route(servicer: GenerationServicer) -> Route:
    """Return the route under which browsers call GenerateText."""
    application = _Application(servicer)
    return _Route(PATH, application, methods=["POST"], include_in_schema=False)


class _Route(Route):
    """A route that puts itself into the scope, where the metrics look for its path."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, found = super().matches(scope)
        return match, {**found, "route": self}


class _Application(ConnectASGIApplication[GenerationServicer]):
    """The library's application, for one method of one service."""

    path = f"/{SERVICE}"

    def __init__(self, servicer: GenerationServicer) -> None:
        codecs = [
            _Reporting(google_protobuf_binary_codec()),
            _Reporting(google_protobuf_json_codec(ignore_unknown_fields=False)),
        ]
        # There is no compression: messages are a few bytes each, and compression would need another
        # limit of their size.
        super().__init__(
            service=servicer,
            endpoints=_endpoints,
            read_max_bytes=MAX_MESSAGE_BYTES,
            compressions=(),
            codecs=codecs,
            interceptors=[_Details()],
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        content_type = headers.get(b"content-type", b"").decode("latin-1").lower()
        if content_type not in _CONTENT_TYPES:
            message = (
                f"the content type must be {', '.join(_CONTENT_TYPES)}; "
                "gRPC itself is on the port of --grpc-listen"
            )
            raise OutriderError(Reason.MALFORMED_REQUEST, message)

        async def bounded() -> Message:
            try:
                return await receive()
            except OutriderError as error:
                raise _connect_error(error) from error

        # The library decodes headers as UTF-8 and fails on other bytes, which HTTP allows.
        readable = [(name, value.decode("latin-1").encode()) for name, value in scope["headers"]]
        await super().__call__({**scope, "headers": readable}, bounded, send)


def _endpoints(servicer: GenerationServicer) -> Mapping[str, Any]:
    async def generate_text(
        request: GenerateTextRequest, context: _Context
    ) -> AsyncGenerator[GenerateTextResponse, None]:
        try:
            left_ms = context.timeout_ms
            left_s = None if left_ms is None else left_ms / 1000
            answer = servicer.answer(request, dict(context.request_headers), left_s)
            async with aclosing(answer) as responses:
                async for response in responses:
                    yield response
        except OutriderError as error:
            raise _connect_error(error) from error
        except Exception:  # noqa: BLE001  # `unexpected` logs any other failure, and gives INTERNAL
            raise _connect_error(rpc_errors.unexpected("GenerateText")) from None

    return {PATH: Endpoint.server_stream(_METHOD, generate_text)}


def _connect_error(error: OutriderError) -> ConnectError:
    """Convert the error, with gRPC's status and details, and note it for the access line."""
    access_log.current().error = error.reason.name.lower()
    details = [
        PackedDetail(type_url=packed.type_url, value=packed.value)
        for packed in rpc_errors.status_of(error).details
    ]
    code = Code[error.reason.kind.status.replace("CANCELLED", "CANCELED")]
    return ConnectError(code, error.message, [ErrorDetail(detail) for detail in details])


class _Details(MetadataInterceptor[None]):
    """Gives errors of the Connect library a reason, as all errors of the service have."""

    async def on_start(self, ctx: _Context) -> None:
        """Do nothing."""

    async def on_end(self, token: None, ctx: _Context, error: Exception | None, /) -> None:
        """Raise an error with details in place of an error without details."""
        if isinstance(error, ConnectError) and not error.details:
            raise _connect_error(_explained(error)) from error


def _explained(error: ConnectError) -> OutriderError:
    if error.code is Code.RESOURCE_EXHAUSTED:
        message = f"the message is larger than {MAX_MESSAGE_BYTES} bytes"
        return OutriderError(Reason.REQUEST_TOO_LARGE, message)
    return OutriderError(_BY_CODE.get(error.code, Reason.MALFORMED_REQUEST), error.message)


class _Reporting:
    """A codec that bounds JSON before parsing it and reports parse failures with details."""

    def __init__(self, codec: Codec[Any, Any]) -> None:
        self._codec = codec

    def name(self) -> str:
        return self._codec.name()

    def encode(self, message: Any) -> bytes:
        return self._codec.encode(message)

    def decode(self, data: bytes | bytearray, message_class: type[Any]) -> Any:
        try:
            if self.name() == "json":
                check_size(bytes(data), MAX_JSON_VALUES)
            return self._codec.decode(data, message_class)
        except OutriderError as error:
            raise _connect_error(error) from error
        except (DecodeError, ParseError, ValueError, RecursionError) as cause:
            raise _connect_error(_parse_error(cause)) from cause


def _parse_error(cause: Exception) -> OutriderError:
    if unknown := _UNKNOWN_NAME.search(str(cause)):
        name, holder = unknown.groups()
        path = f"{holder}.{name}" if holder else name
        path = path[:_SHOWN_CHARACTERS]
        message = f"{path} is a field that this version does not know"
        return OutriderError(Reason.UNKNOWN_PARAMETER, message, path)
    message = f"the request cannot be parsed: {str(cause)[:_SHOWN_CHARACTERS]}"
    return OutriderError(Reason.MALFORMED_REQUEST, message)
