"""Addresses of an experiment's agents; beyond loopback they need mutual TLS."""

from __future__ import annotations

import ipaddress

from outrider.errors import invalid
from outrider.process.tls import Tls


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
        remedy = "it needs mutual TLS: give tls-cert, tls-key and tls-ca"
        raise invalid(field, f"{address} is not on loopback, so {remedy}")
