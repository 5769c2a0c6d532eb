"""gRPC channels and servers with limits, keepalive, health, reflection and error details."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from outrider.errors import OutriderError, Reason
from outrider.process.network.ports import check_port, refused
from outrider.process.network.reflection import serve_reflection
from outrider.process.network.rpc_checks import CallChecks
from outrider.process.network.stream_status import keep_status
from outrider.process.security.credentials import (
    ClientCredentials,
    client_credentials,
    server_credentials,
)
from outrider.process.security.roles import Role
from outrider.process.security.tls import Tls

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
MAX_REFUSED_BYTES = 64 * 1024 * 1024
"""Up to this size a server reads a message that is too large, and refuses it. A larger message is
answered by gRPC itself, without error details."""
MAX_STREAMS = 4096

# Both ends notice within 12 s that the other has vanished: after 4 s without data they send a ping,
# and wait 8 s for its answer. gRPC also sends pings that measure the link. The time-out of such
# pings is 60 s by default, and no other ping is sent while a ping is in flight, so their time-out
# must be 8 s too. The server must allow frequent pings: by default it answers pings more frequent
# than every 5 minutes with GOAWAY "too_many_pings".
_COMMON_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 4_000),
    ("grpc.keepalive_timeout_ms", 8_000),
    ("grpc.http2.ping_timeout_ms", 8_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
SERVER_OPTIONS: list[tuple[str, Any]] = [
    *_COMMON_OPTIONS,
    ("grpc.max_receive_message_length", MAX_REFUSED_BYTES),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.max_concurrent_streams", MAX_STREAMS),
    ("grpc.so_reuseport", 0),
]
# A lost peer is redialled quickly. The option "min" is the maximum duration of one attempt. A
# connection to another region needs several round trips, so a short attempt would never succeed
# there.
CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    *_COMMON_OPTIONS,
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.enable_http_proxy", 0),
    # Without this option, a new channel would reuse an older channel's connection to the same
    # address, which may be half open.
    ("grpc.use_local_subchannel_pool", 1),
]


def dial(
    address: str, tls: Tls | None = None, server: Role | None = Role.VERIFIER
) -> grpc.aio.Channel:
    """Return a channel to `host:port` or `unix:/path`, with mutual TLS if files are given.

    With TLS, the server's certificate must have the role that `server` names. If `server` is None,
    the certificate must have the name of the host. The function reads the files at once, and the
    channel keeps their contents. Raises OutriderError(INVALID_VALUE) if the files are bad.
    """
    return channel(address, None if tls is None else client_credentials(address, tls, server))


def channel(address: str, credentials: ClientCredentials | None) -> grpc.aio.Channel:
    """Make a channel as `dial` does, with credentials that were read before; None means no TLS."""
    if credentials is None:
        return keep_status(grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS))
    options = [*CHANNEL_OPTIONS, *credentials.options]
    return keep_status(grpc.aio.secure_channel(address, credentials.of_channel, options=options))


class Server:
    """A grpc.aio server with the standard health service and reflection.

    Usage: add servicers to `.grpc`, then `await start(address)`, `await set_serving(True)`, and at
    the end `await stop(grace_s)`. Every service starts as NOT_SERVING.
    """

    def __init__(
        self,
        *services: str,
        max_request_bytes: int = MAX_MESSAGE_BYTES,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),  # type: ignore[type-arg]  # generic in stubs
    ) -> None:
        """`services` are full names, for health and reflection.

        `interceptors` run before the server's own checks of a call.
        """
        self.services = services
        self.ports: list[int] = []
        self.is_serving = False
        """True if the health service answers SERVING for the whole server."""
        self._checks = CallChecks(max_request_bytes)
        self.grpc = grpc.aio.server(
            interceptors=[*interceptors, self._checks], options=SERVER_OPTIONS
        )
        # grpc-stubs lack it.
        self._health: Any = health.aio.HealthServicer()  # type: ignore[attr-defined]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        serve_reflection(self.grpc, (*services, health.SERVICE_NAME))

    async def start(
        self, *addresses: str, tls: Tls | None = None, flag: str = "listen"
    ) -> list[int]:
        """Listen on each `host:port` or `unix:/path`, with TLS and roles if files are given.

        Returns the ports that were bound. Raises OutriderError(INVALID_VALUE) if the files are bad.
        Raises OutriderError(INVALID_VALUE) that names `flag`, the flag with the addresses, if an
        address cannot be bound.
        """
        await self.set_serving(False)
        self._checks.has_roles = tls is not None
        for address in addresses:
            try:
                self.ports.append(self._bind(address, tls))
            except RuntimeError as cause:
                _check_free(flag, address)
                message = f"--{flag}: cannot listen on {address}: {cause}"
                raise OutriderError(Reason.INVALID_VALUE, message, flag) from cause
        await self.grpc.start()
        return self.ports

    def _bind(self, address: str, tls: Tls | None) -> int:
        if tls is None:
            return self.grpc.add_insecure_port(address)
        # Credentials that follow changes of their files can serve only one port.
        return self.grpc.add_secure_port(address, server_credentials(tls))

    async def set_serving(self, serving: bool) -> None:
        """Set the health of every service and of the server as a whole (the empty name)."""
        self.is_serving = serving
        status = health_pb2.HealthCheckResponse.NOT_SERVING
        if serving:
            status = health_pb2.HealthCheckResponse.SERVING
        for service in ("", *self.services):
            await self._health.set(service, status)

    async def stop(self, grace_s: float) -> None:
        """Report NOT_SERVING, let running calls finish for `grace_s`, then cancel them."""
        self.is_serving = False
        await self._health.enter_graceful_shutdown()
        await self.grpc.stop(grace_s)


def _check_free(flag: str, address: str) -> None:
    """Raise OutriderError(INVALID_VALUE) if another process listens there; gRPC hides that."""
    host, _, port = address.rpartition(":")
    if not port.isdigit() or not int(port):
        return
    try:
        check_port(host, int(port))
    except OSError as cause:
        if cause.errno == errno.EADDRINUSE:
            raise refused(flag, host, int(port), cause) from cause
