"""Makes gRPC credentials from the files of mutual TLS, and finds the peer of a call."""

from __future__ import annotations

from typing import Any, NamedTuple

import grpc

from outrider.process.security.roles import Peer, Role, peer_of_grpc
from outrider.process.security.tls import SOCKET_NAME, Tls, WatchedTls


class ClientCredentials(NamedTuple):
    """The contents of a client's files, and the channel options that go with them."""

    of_channel: grpc.ChannelCredentials
    options: list[tuple[str, str]]


def client_credentials(address: str, tls: Tls, server: Role | None) -> ClientCredentials:
    """Return credentials for a server at this address.

    The server's certificate must have the role `server`, or the address' name if `server` is None.
    Raises OutriderError(INVALID_VALUE) if the files are bad.
    """
    pems = tls.read()
    credentials = grpc.ssl_channel_credentials(pems.ca, pems.key, pems.cert)
    return ClientCredentials(credentials, name_options(address, server))


def name_options(address: str, server: Role | None) -> list[tuple[str, str]]:
    """Return channel options with the name that the server's certificate must have.

    The certificate must have the name of the role `server`, or the address' name if `server` is
    None.
    """
    name = None if server is None else server.server_name
    if name is None and address.startswith("unix:"):
        # gRPC would look for a socket's path in the certificate.
        name = SOCKET_NAME
    return [] if name is None else [("grpc.ssl_target_name_override", name)]


def server_credentials(tls: Tls) -> grpc.ServerCredentials:
    """Return credentials whose files are read again for a new connection if they have changed.

    Clients need a certificate if the files have authorities. Raises OutriderError(INVALID_VALUE) if
    the files are bad.
    """

    def load(files: Tls) -> grpc.ServerCertificateConfiguration:
        pems = files.read()
        return grpc.ssl_server_certificate_configuration([(pems.key, pems.cert)], pems.ca)

    watched = WatchedTls(tls, load)

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        """Return what changed files contain; None if none changed. gRPC's own threads call this."""
        return watched.current if watched.refresh() else None

    return grpc.dynamic_ssl_server_credentials(
        watched.current,
        # grpc-stubs do not know that this function may return None.
        fetch,  # type: ignore[arg-type]
        require_client_authentication=tls.ca is not None,
    )


def peer_of(context: grpc.aio.ServicerContext[Any, Any]) -> Peer | None:
    """Return the caller that the call's certificate names; None without TLS.

    Raises OutriderError(CERTIFICATE_NOT_ALLOWED) for a certificate with an unknown role or several
    roles.
    """
    return peer_of_grpc(context.auth_context())
