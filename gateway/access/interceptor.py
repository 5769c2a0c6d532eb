"""Refuses gRPC calls without a valid API key, except health checks."""

from __future__ import annotations

from typing import Any

import grpc
from grpc_health.v1 import health

from gateway.access.gate import Gate
from outrider.errors import OutriderError
from outrider.process.network.rpc_checks import refusal

# Watch is not open: a call of Watch never ends, and strangers could hold any number of such calls.
_OPEN = (f"/{health.SERVICE_NAME}/Check", f"/{health.SERVICE_NAME}/List")


class RequireKeyInCalls(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # only the stubs are generic
    """Answers UNAUTHENTICATED to calls that the gate refuses, except health checks."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    async def intercept_service(
        self, continuation: Any, handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        """Return the method's handler, or a handler that refuses the call."""
        if handler_call_details.method not in _OPEN:
            try:
                self._gate.identify(text_metadata(handler_call_details.invocation_metadata))
            except OutriderError as error:
                return refusal(error)
        return await continuation(handler_call_details)


def text_metadata(metadata: Any) -> dict[str, str]:
    """Return a call's metadata, keyed by name, without binary values."""
    return {key: value for key, value in metadata or () if isinstance(value, str)}
