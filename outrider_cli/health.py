"""Asks a process for its health over gRPC.

This module loads little, because containers run the command every few seconds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.process.files import read_file
from outrider.process.security.credentials import name_options
from outrider.process.security.roles import Role

# The command's time-out, which is less than the time-out of the containers' health checks.
_TIMEOUT_S = 3.0


def problem(
    address: str,
    service: str,
    cert: Path | None = None,
    key: Path | None = None,
    ca: Path | None = None,
    server: Role | None = None,
) -> str | None:
    """Return why a service does not serve, or None if it does.

    `address` is `host:port` or `unix:/path`; an empty `service` means the whole process. With `ca`
    the call uses TLS, with the caller's certificate if there is one. The process's certificate must
    have the role `server` or, if `server` is None, the dialled name or address.
    """
    try:
        channel = _channel(address, server, _content(cert), _content(key), _content(ca))
    except OSError as error:
        return f"{error.filename} cannot be read: {error.strerror}"
    with channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=service), timeout=_TIMEOUT_S
            )
        except grpc.RpcError as error:
            return _reason(error, service)
    if answer.status == health_pb2.HealthCheckResponse.SERVING:
        return None
    status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return f"{service or 'the process'} is {status}"


def _content(path: Path | None) -> bytes | None:
    return None if path is None else read_file(path)


def _channel(
    address: str, server: Role | None, cert: bytes | None, key: bytes | None, ca: bytes | None
) -> grpc.Channel:
    options: list[tuple[str, Any]] = [("grpc.enable_http_proxy", 0)]
    if ca is None:
        return grpc.insecure_channel(address, options=options)
    options += name_options(address, server)
    credentials = grpc.ssl_channel_credentials(ca, key, cert)
    return grpc.secure_channel(address, credentials, options=options)


def _reason(error: grpc.RpcError, service: str) -> str:
    status = error.code()
    if status is grpc.StatusCode.NOT_FOUND:
        return f"there is no service {service!r}"
    details = str(error.details())
    if "Hostname Verification Check failed" in details:
        hint = "for verifiers and drafters, --role says which role it must have instead"
        return f"the certificate does not have the name that was dialled; {hint}: {details}"
    return f"{status.name}: {details}"
