"""Certificates of a campaign's processes, for mutual TLS between all of them."""

from __future__ import annotations

import ssl
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from outrider.process.certs import Authority
from outrider.process.roles import Role
from outrider_bench.experiment.hosts import Launch

_VALID = timedelta(days=30)


class Certificates:
    """A private authority in a directory, which signs a certificate for each process."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._authority = Authority.new()
        self._authority.write(directory)

    def trust(self) -> ssl.SSLContext:
        """The TLS settings of a client of the gateways."""
        return ssl.create_default_context(cafile=self._directory / "ca.pem")

    def given_to(self, launch: Launch, role: Role) -> Launch:
        """The launch of a process that uses TLS; its certificate has its name."""
        self._authority.write_issued(self._directory, role.value, launch.name, [], _VALID)
        own = self._directory / f"{launch.name}.pem"
        files = {"tls-cert": own, "tls-key": own.with_suffix(".key")}
        given = {**files, "tls-ca": self._directory / "ca.pem"}
        if role is Role.GATEWAY:
            given |= {f"public-{name}": path for name, path in files.items()}
        words = [word for name, path in given.items() for word in (f"--{name}", str(path))]
        return replace(launch, arguments=(*launch.arguments, *words))
