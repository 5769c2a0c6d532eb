"""Addresses of verifiers: plain addresses, and names whose replicas come and go.

`dns:NAME:PORT` stands for all addresses that the system's resolver has for NAME, such as the
addresses of a headless Service of Kubernetes, or of tasks.SERVICE in a Docker swarm.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence

log = logging.getLogger(__name__)

_PREFIX = "dns:"
_RESOLVE_S = 2.0


def is_name(address: str) -> bool:
    """Return whether the address stands for all replicas of a name."""
    return address.startswith(_PREFIX)


def check_address(address: str) -> None:
    """Raise ValueError for a name that is not `dns:NAME:PORT`."""
    if is_name(address):
        host, port = _parts(address)
        if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(f"must name dns:NAME:PORT, not {address}")


class Addresses:
    """A list of addresses. Its `dns:` names are resolved repeatedly."""

    def __init__(
        self, entries: Sequence[str], on_failure: Callable[[str], object] | None = None
    ) -> None:
        """`on_failure` is called with a name each time that it cannot be resolved."""
        self._entries = list(dict.fromkeys(entries))
        self._on_failure = on_failure
        self._found: dict[str, list[str]] = {
            entry: [] if is_name(entry) else [entry] for entry in self._entries
        }
        self.problems: dict[str, str] = {}
        """Maps a name to why it could not be resolved at the last try."""

    @property
    def has_names(self) -> bool:
        """True if addresses may come and go."""
        return any(map(is_name, self._entries))

    @property
    def now(self) -> list[str]:
        """The present addresses without repetition.

        A name stands for the addresses of its last answer.
        """
        return list(dict.fromkeys(each for entry in self._entries for each in self._found[entry]))

    async def follow(self, take: Callable[[list[str]], Awaitable[None]]) -> None:
        """Resolve the names repeatedly, and pass all addresses to `take` each time."""
        while True:
            await self.refresh()
            await take(self.now)
            await asyncio.sleep(_RESOLVE_S)

    async def refresh(self) -> None:
        """Resolve all names, concurrently. A name that cannot be resolved keeps its last answer."""
        names = [entry for entry in self._entries if is_name(entry)]
        await asyncio.gather(*map(self._resolve, names))

    async def _resolve(self, name: str) -> None:
        host, port = _parts(name)
        try:
            # The system's resolver has time-outs of its own.
            found = await resolve(host, int(port))
        # A name with an impossible label raises UnicodeError.
        except (OSError, UnicodeError) as cause:
            self._failed(name, getattr(cause, "strerror", None) or str(cause))
            return
        if self.problems.pop(name, None) is not None:
            log.info("%s is resolved again: %s", name, ", ".join(found))
        self._found[name] = found

    def _failed(self, name: str, reason: str) -> None:
        message = f"{name} cannot be resolved ({reason})"
        if self._found[name]:
            message += f"; its last addresses stay: {', '.join(self._found[name])}"
        if self.problems.get(name) != message:
            log.warning("%s", message)
        self.problems[name] = message
        if self._on_failure is not None:
            self._on_failure(name)


async def resolve(host: str, port: int) -> list[str]:
    """Return all addresses of a host, sorted, each with the port. Raises OSError or UnicodeError.

    If the host has IPv4 and IPv6 addresses, the IPv6 addresses are left out, since each replica
    probably has an address of each kind.
    """
    loop = asyncio.get_running_loop()
    infos = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    found: dict[int, set[str]] = {}
    for family, _, _, _, address in infos:
        found.setdefault(family, set()).add(str(address[0]))
    if socket.AF_INET in found:
        return [f"{host}:{port}" for host in sorted(found[socket.AF_INET])]
    return [f"[{host}]:{port}" for host in sorted(found.get(socket.AF_INET6, ()))]


def _parts(name: str) -> tuple[str, str]:
    host, _, port = name.removeprefix(_PREFIX).rpartition(":")
    return host, port
