"""gRPC's reflection, with which tools read a server's services and messages."""

from __future__ import annotations

from collections.abc import Iterable

import grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

_V1 = "grpc.reflection.v1.ServerReflection"


def serve_reflection(server: grpc.aio.Server, services: Iterable[str]) -> None:
    """Serve reflection of these services, by full name, under both of its own names.

    The messages are the same, and grpcio-reflection has only the older name.
    """
    names = (*services, reflection.SERVICE_NAME, _V1)
    reflection.enable_server_reflection(names, server)
    # grpc-stubs lack it.
    servicer = reflection.aio.ReflectionServicer(names)  # type: ignore[attr-defined]
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        reflection_pb2.ServerReflectionRequest.FromString,
        reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    method = grpc.method_handlers_generic_handler(_V1, {"ServerReflectionInfo": handler})
    server.add_generic_rpc_handlers((method,))
