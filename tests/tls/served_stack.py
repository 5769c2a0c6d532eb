"""A stack as `outrider serve` plans it, with a Redis, and a recording wire before each port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from outrider.process.network.ports import free_port
from outrider.process.security.certs import NAMES
from outrider.process.security.tls import Tls
from outrider_bench.experiment.links import ShapedLink
from outrider_bench.experiment.spec import Link
from outrider_cli.serve_settings import ServeSettings
from outrider_cli.stack_plan import plan_stack
from tests.certificates import trusting
from tests.redis_servers import Certificates, Standalone
from tests.stack import DRAFT, Process

HOST = "127.0.0.1"
WIRES_HOST = "127.0.0.2"
"""The address of all wires. A drafter of another test may still dial a port of 127.0.0.1 whose
verifier has ended. A wire on this port would record the drafter's bytes."""
PORTS = (
    "gateway HTTP",
    "gateway gRPC",
    "verifier",
    "verifier metrics",
    "drafter health",
    "drafter metrics",
    "Redis",
)


@dataclass
class Served:
    """A running stack: its ports, keyed by name, and before each port a wire with its own address.

    The processes dial the wires. Without `certificates` nothing has TLS.
    """

    ports: dict[str, int]
    wires: dict[str, ShapedLink]
    addresses: dict[str, str]
    redis: Standalone
    certificates: Certificates | None

    def tls(self, role: str) -> Tls | None:
        """Return the files of a role; None without TLS."""
        if self.certificates is None:
            return None
        folder = self.certificates.folder
        return Tls(folder / f"{role}.pem", folder / f"{role}.key", self.certificates.ca)

    def http(self, address: str, tls: Tls | None) -> httpx.AsyncClient:
        """Return an HTTP client, which shows the certificate of `tls` unless `tls` is None."""
        if self.certificates is None:
            return httpx.AsyncClient(base_url=f"http://{address}", timeout=60)
        verify = trusting(self.certificates.ca, tls)
        return httpx.AsyncClient(base_url=f"https://{address}", verify=verify)


@asynccontextmanager
async def served(folder: Path, *, encrypted: bool) -> AsyncIterator[Served]:
    """Run a verifier, an n-gram drafter, a gateway and a Redis."""
    certificates = None
    if encrypted:
        certificates = Certificates(folder / "certs", clients=True)
        for role in NAMES:
            certificates.issue(role, hosts=[WIRES_HOST])
    async with AsyncExitStack() as stack:
        redis = Standalone(folder / "redis", certificates)
        stack.callback(redis.close)
        ports = {name: free_port() for name in PORTS} | {"Redis": redis.data[0].port}
        wires = {name: ShapedLink(Link(), records=True) for name in ports}
        addresses = {}
        for name, wire in wires.items():
            forwarding = wire.forward((WIRES_HOST, 0), (HOST, ports[name]))
            addresses[name] = f"{WIRES_HOST}:{await stack.enter_async_context(forwarding)}"
        made = Served(ports, wires, addresses, redis, certificates)
        for process in _processes(made, folder):
            stack.callback(process.log.close)
            stack.push_async_callback(asyncio.to_thread, process.stop)
        async with made.http(f"{HOST}:{ports['gateway HTTP']}", made.tls("operator")) as client:
            await asyncio.wait_for(_drafting(client), 90)
        yield made


def _processes(made: Served, folder: Path) -> Iterator[Process]:
    """Start each process."""
    listen = f"{HOST}:{made.ports['verifier']}"
    wire = made.addresses["verifier"]
    for child in plan_stack(_settings(made, folder), folder).children:
        words = child.arguments
        if child.name == "verifier":
            metrics = str(made.ports["verifier metrics"])
            words = [*words, "--always-draft", "--metrics-port", metrics]
        else:
            words = [wire if word == listen else word for word in words]
        if child.name == "gateway" and made.certificates is not None:
            words = [*words, "--public-tls-ca", str(made.certificates.ca)]
        yield Process(child.module, *words)


def _settings(made: Served, folder: Path) -> ServeSettings:
    (folder / "secret").write_text("0123456789abcdef")
    # This socket does not exist, so the drafter dials the verifier's port.
    own = {
        "uds": folder / "none",
        "listen": f"127.0.0.1:{made.ports['drafter health']}",
        "metrics_port": made.ports["drafter metrics"],
        "redis": made.redis.url.replace(f"{HOST}:{made.ports['Redis']}", made.addresses["Redis"]),
        "redis_password_file": made.redis.password_file,
        "pool_secret_file": folder / "secret",
    }
    given: dict[str, Any] = {
        # The smaller model starts sooner.
        "target": DRAFT,
        "dtype": "float32",
        "threads": 1,
        "drafter": ["ngram," + ",".join(f"{name}={value}" for name, value in own.items())],
        "http_port": made.ports["gateway HTTP"],
        "grpc_port": made.ports["gateway gRPC"],
        "verifier_port": made.ports["verifier"],
        "certs": None if made.certificates is None else made.certificates.folder,
    }
    return ServeSettings.model_validate(given)


async def _drafting(client: httpx.AsyncClient) -> None:
    """Wait until a drafter is connected."""
    while True:
        try:
            verifiers = (await client.get("/readyz")).json().get("verifiers", [])
        except httpx.TransportError:
            verifiers = []
        drafters = [drafter for verifier in verifiers for drafter in verifier.get("drafters", [])]
        if any(drafter["connected"] for drafter in drafters):
            return
        await asyncio.sleep(0.1)
