"""Refuses gRPC calls before their handlers see them: by role, by size and by content."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from outrider.errors import OutriderError, Reason
from outrider.process.credentials import peer_of
from outrider.process.roles import check_call
from outrider.process.rpc_errors import abort

# An error travels in a call's metadata, of which gRPC allows 8 KiB.
_SHOWN_CHARACTERS = 200


class CallChecks(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in stubs
    """Refuses calls to unknown methods and calls that the peer's role may not make.

    It also refuses messages that are larger than `most_bytes` or cannot be parsed. gRPC itself
    would answer without details, and log a traceback for the latter. The handler of a stream sees
    an OutriderError where it reads: REQUEST_TOO_LARGE or MALFORMED_REQUEST.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
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
            method = handler_call_details.method[:_SHOWN_CHARACTERS]
            message = f"there is no method {method} here"
            return refusal(OutriderError(Reason.ROUTE_NOT_FOUND, message))
        request_kind = "stream" if handler.request_streaming else "unary"
        response_kind = "stream" if handler.response_streaming else "unary"
        kind = f"{request_kind}_{response_kind}"
        behaviour = getattr(handler, kind)
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        check = _checked_stream if handler.request_streaming else _checked
        parse = handler.request_deserializer
        deserializer = functools.partial(_parsed, parse, self._most_bytes)
        admit = functools.partial(self._admit, handler_call_details.method)
        refusing = _refusing(behaviour, admit, check)
        return make(refusing, deserializer, handler.response_serializer)


def refusal(error: OutriderError) -> Any:
    """A handler that ends each call with this error."""

    # A stream of requests suits every method: a single request is a stream of one.
    async def refuse(_requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await abort(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)


def _parsed(parse: Callable[[bytes], Any], most_bytes: int, data: bytes) -> Any:
    """The message, or the error that takes its place."""
    if len(data) > most_bytes:
        message = f"the message has {len(data)} bytes; at most {most_bytes} are allowed"
        return OutriderError(Reason.REQUEST_TOO_LARGE, message)
    try:
        return parse(data)
    except DecodeError:
        message = "the request cannot be parsed: it is not a message of the method's type"
        return OutriderError(Reason.MALFORMED_REQUEST, message)


def _checked(request: Any) -> Any:
    if isinstance(request, OutriderError):
        raise request
    return request


async def _checked_stream(requests: Any) -> AsyncIterator[Any]:
    async for request in requests:
        yield _checked(request)


def _refusing(
    behaviour: Callable[..., Any], admit: Callable[[Any], None], check: Callable[[Any], Any]
) -> Callable[..., Any]:
    """The handler, which first calls `admit` with the context, then takes checked requests.

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
