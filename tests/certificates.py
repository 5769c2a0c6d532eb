"""Makes an authority in a folder, and the certificates that it signs."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from outrider.process.security.certs import Authority
from outrider.process.security.tls import Tls


class Site:
    """An authority in a folder, and certificates that this or another authority signed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = Authority.new()
        folder.mkdir(parents=True, exist_ok=True)
        self.authority.write(folder)
        self._other = Authority.new()

    @property
    def ca(self) -> Path:
        return self.folder / "ca.pem"

    def issue(
        self,
        kind: str,
        name: str = "",
        *,
        hosts: Sequence[str] = (),
        hours: float = 1.0,
        foreign: bool = False,
    ) -> Tls:
        """Write a certificate, which replaces an earlier one of the same name.

        `hosts` are names and addresses besides this machine's own.
        """
        name = name or kind
        authority = self._other if foreign else self.authority
        authority.write_issued(self.folder, kind, name, hosts, timedelta(hours=hours))
        return Tls(self.folder / f"{name}.pem", self.folder / f"{name}.key", self.ca)

    def context(self, tls: Tls | None) -> ssl.SSLContext:
        """Return the TLS context of a client that trusts the authority; see `trusting`."""
        return trusting(self.ca, tls)

    async def serial(self, port: int, tls: Tls) -> str:
        """Return the serial number of the certificate that a server on 127.0.0.1 shows now."""
        context = self.context(tls)
        context.set_alpn_protocols(["h2", "http/1.1"])
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        serial: str = writer.get_extra_info("peercert")["serialNumber"]
        writer.transport.abort()
        return serial


def trusting(ca: Path, tls: Tls | None) -> ssl.SSLContext:
    """Return the TLS context of a client that trusts an authority.

    If `tls` is given, the client shows the certificate of `tls`.
    """
    context = ssl.create_default_context(cafile=str(ca))
    if tls is not None:
        context.load_cert_chain(tls.cert, tls.key)
    return context
