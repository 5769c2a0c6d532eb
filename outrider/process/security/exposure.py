"""Refuses addresses at which anybody could call a process, unless the operator allows that."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence


def check_exposure(listens: Sequence[str], *, has_keys: bool, is_open: bool) -> None:
    """Raise ValueError if anybody could call the gateway and its operator did not allow that.

    Also raises ValueError if the gateway has keys and `is_open` is true. `listens` are the hosts of
    the gateway's ports, and unix:/path for sockets.
    """
    if has_keys and is_open:
        raise ValueError("open means a gateway without keys, but keys are given; give one of them")
    exposed = [host for host in listens if not is_local(host)]
    if exposed and not has_keys and not is_open:
        raise ValueError(
            f"{exposed[0]} is not a loopback address, so anybody who reaches it could call the "
            "gateway: make keys with `outrider keys add FILE --tenant NAME` and give --keys-file "
            "FILE, or give --open to let everybody in"
        )


def check_verifier_exposure(host: str, *, has_tls: bool, is_open: bool, remedy: str) -> None:
    """Raise ValueError if anybody could call the verifier and its operator did not allow that.

    `remedy` names the settings that help.
    """
    if not (is_local(host) or has_tls or is_open):
        raise ValueError(
            f"{host} is not a loopback address, so anybody who reaches it could call the verifier, "
            f"and see requests as a drafter: {remedy}"
        )


def host_of(listen: str) -> str:
    """Return the host of host:port, without brackets; unix:/path is returned as it is."""
    if listen.startswith("unix:"):
        return listen
    return listen.rpartition(":")[0].removeprefix("[").removesuffix("]")


def is_local(host: str) -> bool:
    """Return whether only processes of this machine reach what listens on `host`."""
    return host.startswith("unix:") or is_loopback(host)


def is_loopback(host: str) -> bool:
    """Return whether a host is an address of the loopback interface, or localhost."""
    if is_address(host):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def is_address(name: str) -> bool:
    """Return whether a name is an IP address."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
