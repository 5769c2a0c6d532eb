"""Asks a process for its health over gRPC. Loads little, since containers ask every few seconds."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


def problem(address: str, service: str, timeout_s: float) -> str | None:
    """Why the service at `host:port` or `unix:/path` does not serve; None if it does. An empty `service` is the whole process."""
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=service), timeout=timeout_s
            )
        except grpc.RpcError as error:
            return _reason(error, service)
    if answer.status == health_pb2.HealthCheckResponse.SERVING:
        return None
    return f"{service or 'the process'} is {health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)}"


def _reason(error: grpc.RpcError, service: str) -> str:
    status, details = error.code(), error.details()
    if status is grpc.StatusCode.NOT_FOUND:
        return f"there is no service {service!r}"
    return f"{status.name}: {details}"
