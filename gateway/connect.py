"""GenerationService on the HTTP port, for browsers: the Connect protocol and gRPC-Web around the servicer's own generator."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from connectrpc.code import Code
from connectrpc.codec import Codec
from connectrpc.compat import google_protobuf_binary_codec, google_protobuf_json_codec
from connectrpc.errors import ConnectError, ErrorDetail
from connectrpc.method import IdempotencyLevel, MethodInfo, StreamType
from connectrpc.request import RequestContext
from connectrpc.server import ConnectASGIApplication, Endpoint
from google.protobuf.json_format import ParseError
from google.protobuf.message import DecodeError
from protobuf.wkt import Any as PackedDetail
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route
from starlette.types import Message, Receive, Scope, Send

from gateway.json_body import check_size
from gateway.servicer import SERVICE, GenerationServicer
from outrider.errors import OutriderError, Reason
from outrider.process import rpc
from outrider.v1.generation_pb2 import GenerateTextRequest, GenerateTextResponse

PATH = f"/{SERVICE}/GenerateText"
ERROR_HEADERS = ("Grpc-Status", "Grpc-Message", "Grpc-Status-Details-Bin")
"""Where gRPC-Web says how a call ended that never began."""
MAX_JSON_VALUES = 65_536
"""Most values of a request in JSON, since making a message of them takes longer than parsing them."""
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


def route(servicer: GenerationServicer, max_request_bytes: int) -> Route:
    """The route under which browsers call GenerateText."""
    return _Route(
        PATH, _Application(servicer, max_request_bytes), methods=["POST"], include_in_schema=False
    )


class _Route(Route):
    """A route that metrics know by its path, as they do FastAPI's own."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, found = super().matches(scope)
        return match, {**found, "route": self}


class _Application(ConnectASGIApplication[GenerationServicer]):
    """The library's application, for one method of one service."""

    path = f"/{SERVICE}"

    def __init__(self, servicer: GenerationServicer, max_request_bytes: int) -> None:
        codecs = [
            _Reporting(google_protobuf_binary_codec()),
            _Reporting(google_protobuf_json_codec(ignore_unknown_fields=False)),
        ]
        # Each message is a few bytes, and compressed ones would have to be bounded twice.
        super().__init__(
            service=servicer,
            endpoints=_endpoints,
            read_max_bytes=max_request_bytes,
            compressions=(),
            codecs=codecs,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        content_type = headers.get(b"content-type", b"").decode("latin-1").lower()
        if content_type not in _CONTENT_TYPES:
            message = f"the content type must be {', '.join(_CONTENT_TYPES)}; gRPC itself is on the port of --grpc-listen"
            raise OutriderError(Reason.MALFORMED_REQUEST, message)

        async def bounded() -> Message:
            try:
                return await receive()
            except HTTPException as refusal:
                raise _connect_error(
                    OutriderError(Reason.REQUEST_TOO_LARGE, refusal.detail)
                ) from refusal

        # The library reads headers as UTF-8, which HTTP does not promise.
        readable = [(name, value.decode("latin-1").encode()) for name, value in scope["headers"]]
        await super().__call__({**scope, "headers": readable}, bounded, send)


def _endpoints(servicer: GenerationServicer) -> Mapping[str, Any]:
    async def generate_text(
        request: GenerateTextRequest, context: _Context
    ) -> AsyncGenerator[GenerateTextResponse, None]:
        try:
            async with aclosing(
                servicer.answer(request, dict(context.request_headers))
            ) as responses:
                async for response in responses:
                    yield response
        except OutriderError as error:
            raise _connect_error(error) from error
        except Exception:  # noqa: BLE001  # logged, and answered with INTERNAL
            raise _connect_error(rpc.unexpected("GenerateText")) from None

    return {PATH: Endpoint.server_stream(_METHOD, generate_text)}


def _connect_error(error: OutriderError) -> ConnectError:
    """The error with the status and the details that it has over gRPC."""
    details = [
        PackedDetail(type_url=packed.type_url, value=packed.value)
        for packed in rpc.status_of(error).details
    ]
    code = Code[error.reason.kind.status.replace("CANCELLED", "CANCELED")]
    return ConnectError(code, error.message, [ErrorDetail(detail) for detail in details])


class _Reporting:
    """A codec that bounds what JSON holds before it is parsed, and refuses with details what it cannot parse."""

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
            message = f"the request cannot be parsed: {str(cause)[:300]}"
            raise _connect_error(OutriderError(Reason.MALFORMED_REQUEST, message)) from cause
