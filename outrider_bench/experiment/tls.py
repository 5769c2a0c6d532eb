"""Mutual TLS between an experiment's controller and agents; required beyond loopback."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

import grpc

from outrider.errors import invalid


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files: a certificate, its key, and the authorities of the peer's certificate."""

    cert: Path
    key: Path
    ca: Path

    @classmethod
    def of(cls, cert: Path | None, key: Path | None, ca: Path | None) -> Tls | None:
        """The three files; None if none is named.

        Raises OutriderError(INVALID_VALUE) if only some are named or one is not a file.
        """
        given = {"tls_cert": cert, "tls_key": key, "tls_ca": ca}
        if cert is None or key is None or ca is None:
            missing = [name for name, path in given.items() if path is None]
            if len(missing) == len(given):
                return None
            raise invalid(missing[0], "must be given too: tls_cert, tls_key and tls_ca go together")
        for name, path in given.items():
            if path is not None and not path.is_file():
                raise invalid(name, f"{path} is not a file")
        return cls(cert, key, ca)

    def server(self) -> grpc.ServerCredentials:
        """Credentials of a server. It refuses clients that the authorities did not certify."""
        pair = (self.key.read_bytes(), self.cert.read_bytes())
        return grpc.ssl_server_credentials([pair], self.ca.read_bytes(), require_client_auth=True)

    def channel(self) -> grpc.ChannelCredentials:
        """Credentials of a client."""
        return grpc.ssl_channel_credentials(
            self.ca.read_bytes(), self.key.read_bytes(), self.cert.read_bytes()
        )


def split_address(field: str, address: str) -> tuple[str, int]:
    """Host and port of `host:port` or `[IPv6]:port`.

    Raises OutriderError(INVALID_VALUE) that names the field.
    """
    host, colon, port = address.rpartition(":")
    if not host or not colon or not port.isdecimal() or int(port) > 65_535:
        raise invalid(field, f"must be host:port with a port of at most 65535, not {address!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine can reach the host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def require_tls(field: str, address: str, tls: Tls | None) -> None:
    """Raise OutriderError(INVALID_VALUE) for an address beyond loopback without TLS."""
    host, _ = split_address(field, address)
    if tls is None and not is_loopback(host):
        remedy = "it needs mutual TLS: give tls_cert, tls_key and tls_ca"
        raise invalid(field, f"{address} is not on loopback, so {remedy}")
