"""gRPC's reflection, with which tools read a server's services and messages."""

from __future__ import annotations

from collections.abc import Iterable

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.rpc import error_details_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

_V1ALPHA = "grpc.reflection.v1alpha"
_V1 = "grpc.reflection.v1"


def serve_reflection(server: grpc.aio.Server, services: Iterable[str]) -> None:
    """Serve both versions of gRPC's reflection, for these services, given by full name.

    Both versions have the same messages; grpcio-reflection itself serves only the older version.
    """
    names = (*services, reflection.SERVICE_NAME, f"{_V1}.ServerReflection")
    pool = _described(names)
    reflection.enable_server_reflection(names, server, pool)
    # grpc-stubs lack it.
    servicer = reflection.aio.ReflectionServicer(names, pool)  # type: ignore[attr-defined]
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        reflection_pb2.ServerReflectionRequest.FromString,
        reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    method = grpc.method_handlers_generic_handler(names[-1], {"ServerReflectionInfo": handler})
    server.add_generic_rpc_handlers((method,))


def _described(services: Iterable[str]) -> descriptor_pool.DescriptorPool:
    """Return a descriptor pool with the services, the error details and the newer reflection.

    The pool is the server's own. In the process's pool, the file of the newer reflection would
    clash with a library that brings this file itself.
    """
    known = descriptor_pool.Default()
    pool = descriptor_pool.DescriptorPool()
    added: set[str] = set()
    _add(pool, error_details_pb2.DESCRIPTOR, added)
    for service in services:
        try:
            _add(pool, known.FindFileContainingSymbol(service), added)
        except KeyError:
            continue
    pool.AddSerializedFile(_newer_reflection())
    return pool


def _add(pool: descriptor_pool.DescriptorPool, file: FileDescriptor, added: set[str]) -> None:
    """Add a file after the files that it imports."""
    if file.name in added:
        return
    added.add(file.name)
    for imported in file.dependencies:
        _add(pool, imported, added)
    pool.AddSerializedFile(file.serialized_pb)


def _newer_reflection() -> bytes:
    """Return the file of the reflection v1: the older file, renamed."""
    file = FileDescriptorProto.FromString(reflection_pb2.DESCRIPTOR.serialized_pb)
    file.name = file.name.replace("v1alpha", "v1")
    file.package = _V1
    for message in file.message_type:
        # Fields of numbers and texts have no type name, and must not have an empty type name.
        for field in filter(lambda field: field.type_name, message.field):
            field.type_name = field.type_name.replace(_V1ALPHA, _V1)
    for service in file.service:
        for method in service.method:
            method.input_type = method.input_type.replace(_V1ALPHA, _V1)
            method.output_type = method.output_type.replace(_V1ALPHA, _V1)
    return file.SerializeToString()
