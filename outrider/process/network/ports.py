"""Finds a free port for a server, and says which flag names a port that is not free."""

from __future__ import annotations

import errno
import itertools
import random
import socket

from outrider.errors import OutriderError, Reason

# Linux gives outgoing connections ports above these. If a server listened on one of those higher
# ports, an outgoing connection could take the port while the server is down for a moment.
_PORTS = range(20_000, 32_000)
# Each process tries ports in its own order, and tries all ports before it repeats one.
_candidates = itertools.cycle(random.sample(_PORTS, len(_PORTS)))


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port of `host` that nothing listens on now.

    Raises OSError if none is free, or if the address is not this machine's.
    """
    for port in itertools.islice(_candidates, len(_PORTS)):
        try:
            check_port(host, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            return port
    raise OSError(errno.EADDRINUSE, f"no port of {host} in {_PORTS} is free")


def check_port(host: str, port: int) -> None:
    """Raise OSError if a server cannot listen on this port now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))


def refused(flag: str, host: str, port: int, cause: OSError) -> OutriderError:
    """Return the INVALID_VALUE error for the address in `flag`: no server can listen there."""
    address = f"{host}:{port}"
    why = f"cannot listen on {address}: {cause.strerror or cause}"
    if cause.errno == errno.EADDRINUSE:
        why = f"another process listens on {address}; give another port, or 0 for a free one"
    return OutriderError(Reason.INVALID_VALUE, f"--{flag}: {why}", flag.replace("-", "_"))
