"""Gives every gRPC call an id and an access line."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any
from urllib.parse import unquote

import grpc

from gateway import access_log
from gateway.access.interceptor import text_metadata
from gateway.access_log import AccessLog
from outrider.errors import OutriderError
from outrider.process.network.rpc_checks import handler_within
from outrider.process.observability.request_id import HEADER

_Context = grpc.aio.ServicerContext[Any, Any]


class LogCalls(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # only the stubs are generic
    """Sends each call's id in its initial metadata, and logs how the call ended."""

    def __init__(self, log: AccessLog) -> None:
        self._log = log

    async def intercept_service(
        self, continuation: Any, handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        """Wrap the handler that serves or refuses a call, so that it writes an access line."""
        handler = await continuation(handler_call_details)
        return handler_within(partial(self._line, handler_call_details), handler)

    @asynccontextmanager
    async def _line(
        self, details: grpc.HandlerCallDetails, context: _Context
    ) -> AsyncIterator[None]:
        """Log the call that the block serves, after the block has ended."""
        headers = text_metadata(details.invocation_metadata)
        client = _address(context.peer())
        access = access_log.arrived(headers, "gRPC", details.method, client)
        access_log.begin(access)
        status = "OK"
        try:
            await context.send_initial_metadata(((HEADER, access.request_id),))
            yield
        except grpc.aio.AbortError as aborted:
            status = context.code().name
            if isinstance(cause := aborted.__context__, OutriderError):
                access.error = cause.reason.name.lower()
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
    """Return the address from the name that gRPC gives a peer.

    Such a name is `ipv4:127.0.0.1:50051` or `ipv6:%5B::1%5D:50051`.
    """
    kind, _, rest = unquote(peer).partition(":")
    return rest.rpartition(":")[0].strip("[]") if kind.startswith("ip") else peer
