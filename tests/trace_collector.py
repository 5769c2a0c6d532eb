"""A collector of OpenTelemetry's spans for tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from outrider import __version__


def attributes(owner: Any) -> dict[str, Any]:
    """Return the attributes of a span or a resource, keyed by name."""
    return {attribute.key: attribute.value for attribute in owner.attributes}


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Collects pairs of service and span."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []
        self.instances: set[str] = set()
        """The services' instance ids."""

    async def Export(self, request: Any, context: Any) -> Any:
        """Take one batch of spans."""
        for resource in request.resource_spans:
            known = attributes(resource.resource)
            assert known["service.version"].string_value == __version__
            name = known["service.name"].string_value
            if "service.instance.id" in known:
                self.instances.add(known["service.instance.id"].string_value)
            spans = [span for scope in resource.scope_spans for span in scope.spans]
            self.spans += [(name, span) for span in spans]
        return trace_service_pb2.ExportTraceServiceResponse()


@asynccontextmanager
async def collecting() -> AsyncIterator[tuple[Collector, str]]:
    """Run a collector; yield it and its URL."""
    server = grpc.aio.server()
    collector = Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield collector, f"http://127.0.0.1:{port}"
    await server.stop(0)
