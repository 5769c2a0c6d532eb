"""Refuses gRPC calls before their handlers see them: by role, by size and by content.

Errors that handlers raise become the statuses of their calls.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from outrider.errors import OutriderError, Reason
from outrider.process.network.rpc_errors import abort, unexpected
from outrider.process.security.credentials import peer_of
from outrider.process.security.roles import check_call

# An error travels in a call's metadata, of which gRPC allows 8 KiB.
_SHOWN_CHARACTERS = 200
_Context = grpc.aio.ServicerContext[Any, Any]


def _is_no_leaving(record: logging.LogRecord) -> bool:
    """Return False for the record of a gRPC write that failed because the peer has left."""
    return not (record.exc_info and isinstance(record.exc_info[1], grpc.aio.InternalError))


logging.getLogger("grpc._cython.cygrpc").addFilter(_is_no_leaving)


class CallChecks(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in stubs
    """Refuses calls to unknown methods and calls that the peer's role may not make.

    The interceptor also refuses messages that are larger than `most_bytes` or cannot be parsed.
    gRPC itself would answer without details, and log a traceback for a message that it cannot
    parse. When the handler of a stream reads such a message, the read raises an OutriderError:
    REQUEST_TOO_LARGE or MALFORMED_REQUEST.

    An OutriderError that a handler raises becomes the call's status. Any other exception is logged
    and becomes INTERNAL, without its text, which may contain a user's data. A peer that leaves
    while the handler writes is no error.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self.has_roles = False
        """True if every peer has TLS, and so a role."""

    async def intercept_service(
        self, continuation: Any, handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        """Return the method's handler, wrapped in these checks."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None:
            return refusal(_no_method(method))
        check = _checked_stream if handler.request_streaming else _checked
        parse = functools.partial(_parsed, handler.request_deserializer, self._most_bytes)
        enter = functools.partial(self._reporting, method)
        return handler_within(enter, handler, check=check, parse=parse)

    @asynccontextmanager
    async def _reporting(self, method: str, context: _Context) -> AsyncIterator[None]:
        """Admit the call; abort it with the status of the error that ends the block."""
        try:
            if self.has_roles:
                check_call(method, peer_of(context))
            yield
        except OutriderError as error:
            await abort(context, error)
        except grpc.aio.AbortError:
            raise
        except grpc.aio.InternalError:
            # A write failed, because the peer has left. gRPC itself cancels most such calls.
            raise asyncio.CancelledError from None
        except Exception:  # noqa: BLE001  # `unexpected` logs it
            # The generated code of a method that is not implemented sets this status, and raises.
            if context.code() is grpc.StatusCode.UNIMPLEMENTED:
                await abort(context, _no_method(method))
            await abort(context, unexpected(method.rpartition("/")[2]))


def _no_method(method: str) -> OutriderError:
    message = f"there is no method {method[:_SHOWN_CHARACTERS]} here"
    return OutriderError(Reason.ROUTE_NOT_FOUND, message)


def handler_within(
    enter: Callable[[_Context], AbstractAsyncContextManager[None]],
    handler: Any,
    *,
    check: Callable[[Any], Any] = lambda request: request,
    parse: Callable[[bytes], Any] | None = None,
) -> Any:
    """Return a handler like the given handler, whose calls run within `enter(context)`.

    Within the context, `check` changes the request or the stream of requests, or raises. `parse`
    replaces the handler's deserializer. The behaviour stays an asynchronous generator or a
    coroutine function: gRPC calls the two differently.
    """
    kind = "_".join(
        "stream" if streams else "unary"
        for streams in (handler.request_streaming, handler.response_streaming)
    )
    make = getattr(grpc, f"{kind}_rpc_method_handler")
    behaviour = getattr(handler, kind)

    async def answer(request: Any, context: _Context) -> Any:
        async with enter(context):
            return await behaviour(check(request), context)

    async def stream(request: Any, context: _Context) -> AsyncIterator[Any]:
        async with enter(context), aclosing(behaviour(check(request), context)) as responses:
            async for response in responses:
                yield response

    behave = stream if inspect.isasyncgenfunction(behaviour) else answer
    return make(behave, parse or handler.request_deserializer, handler.response_serializer)


def refusal(error: OutriderError) -> Any:
    """Return a handler that ends each call with this error."""

    # A stream of requests suits every method: a single request is a stream of one request.
    async def refuse(_requests: Any, context: _Context) -> None:
        await abort(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)


def _parsed(parse: Callable[[bytes], Any], most_bytes: int, data: bytes) -> Any:
    """Return the parsed message, or an OutriderError in its place."""
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
