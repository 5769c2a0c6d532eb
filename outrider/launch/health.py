"""Asks a process for its health over gRPC; loads little, as containers ask every few seconds."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


def problem(address: str, service: str, timeout_s: float) -> str | None:
    """Return why a service does not serve, or None if it does.

    `address` is `host:port` or `unix:/path`; an empty `service` means the whole process.
    """
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=service), timeout=timeout_s
            )
        except grpc.RpcError as error:
            return _reason(error, service)
    if answer.status == health_pb2.HealthCheckResponse.SERVING:
        return None
    status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return f"{service or 'the process'} is {status}"


def _reason(error: grpc.RpcError, service: str) -> str:
    status = error.code()
    if status is grpc.StatusCode.NOT_FOUND:
        return f"there is no service {service!r}"
    return f"{status.name}: {error.details()}"
