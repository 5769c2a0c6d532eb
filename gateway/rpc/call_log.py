"""Gives every gRPC call an id and an access line."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any
from urllib.parse import unquote

import grpc

from gateway import access_log
from gateway.access.interceptor import text_metadata
from gateway.access_log import AccessLog
from outrider.process.request_id import HEADER

_Context = grpc.aio.ServicerContext[Any, Any]


class LogCalls(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # only the stubs are generic
    """Sends each call's id in its initial metadata, and logs how the call ended."""

    def __init__(self, log: AccessLog) -> None:
        self._log = log

    async def intercept_service(
        self, continuation: Any, handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        """The method's handler, or the handler that refuses the call, with an access line."""
        handler = await continuation(handler_call_details)
        kind = "_".join(
            "stream" if streams else "unary"
            for streams in (handler.request_streaming, handler.response_streaming)
        )
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        behaviour = self._logged(getattr(handler, kind), handler_call_details)
        return make(behaviour, handler.request_deserializer, handler.response_serializer)

    def _logged(
        self, behaviour: Callable[..., Any], details: grpc.HandlerCallDetails
    ) -> Callable[..., Any]:
        """The handler within a line. It stays a coroutine function or an async generator."""
        if not inspect.isasyncgenfunction(behaviour):

            async def answer(request: Any, context: _Context) -> Any:
                async with self._line(details, context):
                    return await behaviour(request, context)

            return answer

        async def stream(request: Any, context: _Context) -> AsyncIterator[Any]:
            async with self._line(details, context), aclosing(behaviour(request, context)) as found:
                async for response in found:
                    yield response

        return stream

    @asynccontextmanager
    async def _line(
        self, details: grpc.HandlerCallDetails, context: _Context
    ) -> AsyncIterator[None]:
        """Log the call that the block serves, once the block has ended."""
        headers = text_metadata(details.invocation_metadata)
        client = _address(context.peer())
        access = access_log.arrived(headers, "gRPC", details.method, client)
        access_log.begin(access)
        status = "OK"
        try:
            await context.send_initial_metadata(((HEADER, access.request_id),))
            yield
        except grpc.aio.AbortError:
            status = context.code().name
            raise
        except (GeneratorExit, asyncio.CancelledError):
            status = "CANCELLED"
            raise
        except Exception:  # the line gets a status; the error goes on to gRPC
            status = "UNKNOWN"
            raise
        finally:
            self._log.called(access, status)


def _address(peer: str) -> str:
    """The address in gRPC's `ipv4:127.0.0.1:50051` or `ipv6:%5B::1%5D:50051`."""
    kind, _, rest = unquote(peer).partition(":")
    return rest.rpartition(":")[0].strip("[]") if kind.startswith("ip") else peer
