"""The stack of a campaign: two verifiers, two gateways, drafters, Redis, and links between them."""

from __future__ import annotations

import asyncio
import resource
import secrets
import ssl
import tempfile
from collections.abc import (
    AsyncIterator,
    Collection,
    Iterable,
    Mapping,
)
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
from redis.asyncio import Redis

from outrider.process.network.ports import free_port
from outrider.process.security.certs import Authority
from outrider.process.security.roles import Role
from outrider_bench.chaos.observe import in_use, size_of, within
from outrider_bench.chaos.parts import DRAFTERS, GATEWAYS, VERIFIERS
from outrider_bench.experiment.child import LOOPBACK, Launch
from outrider_bench.experiment.launches import (
    Dial,
    Endpoint,
    drafter_launch,
    gateway_launch,
    verifier_launch,
)
from outrider_bench.experiment.link_process import LinkControl
from outrider_bench.experiment.processes import Processes, StackFailed
from outrider_bench.experiment.spec import Target
from outrider_bench.experiment.stack import start_link

# There are few pages, so that a crowd's requests wait for pages and lose pages to other requests.
_TARGET = Target.model_validate({"threads": 1, "settings": {"page_count": 256}})
_ASK_S = 5.0
_VALID = timedelta(days=30)
_RECOVERS_S = 90.0
_QUIET_S = 20.0


class Certificates:
    """A private authority in a directory, which signs a certificate for each process."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._authority = Authority.new()
        self._authority.write(directory)

    def trust(self) -> ssl.SSLContext:
        """Return the TLS settings of a client of the gateways."""
        return ssl.create_default_context(cafile=self._directory / "ca.pem")

    def given_to(self, launch: Launch, role: Role) -> Launch:
        """Return the launch with TLS; the process's certificate has the name of the launch."""
        self._authority.write_issued(self._directory, role.value, launch.name, [], _VALID)
        own = self._directory / f"{launch.name}.pem"
        files = {"tls-cert": own, "tls-key": own.with_suffix(".key")}
        given = {**files, "tls-ca": self._directory / "ca.pem"}
        if role is Role.GATEWAY:
            given |= {f"public-{name}": path for name, path in files.items()}
        words = [word for name, path in given.items() for word in (f"--{name}", str(path))]
        return replace(launch, arguments=(*launch.arguments, *words))


class Site:
    """The running stack. With certificates, its processes use mutual TLS, and clients HTTPS."""

    def __init__(self, absent: frozenset[str], directory: Path, *, tls: bool) -> None:
        """`absent` has the parts that are left out; the stack writes files to `directory`."""
        certificates = Certificates(directory) if tls else None
        self.links: dict[str, LinkControl] = {}
        self.processes = Processes()
        self.gateways: dict[str, str] = {}
        """The URL of each gateway."""
        self.trust: ssl.SSLContext | bool = certificates is not None and certificates.trust()
        """httpx's argument `verify`: how clients check the gateways' certificates."""
        self._certificates = certificates
        self._absent = absent
        self._directory = directory
        self._drafters = [name for name in DRAFTERS if name not in absent]
        self._verifiers: list[Endpoint] = []
        self._redis_port = 0
        self._http = httpx.AsyncClient(
            timeout=_ASK_S,
            limits=httpx.Limits(max_keepalive_connections=0),
            verify=self.trust,
            trust_env=False,
        )

    async def start(self) -> None:
        """Start all processes, and wait until they are ready. Raises StackFailed if one fails."""
        redis = await self._start_redis()
        for name in VERIFIERS:
            await self._start_verifier(name)
        addresses = [endpoint.verifier for endpoint in self._verifiers]
        fronts = [await self._link(str(number), to) for number, to in enumerate(addresses, 1)]
        for name in GATEWAYS:
            await self._start_gateway(name, ",".join(fronts))
        for name in self._drafters:
            linked = await self._links(name, addresses)
            drafter = DRAFTERS[name]
            if name in ("ngram", "suffix") and redis:
                secret = self._directory / "pool-secret"
                secret.write_text(secrets.token_hex(16))
                pool = {"redis": redis, "pool_secret_file": str(secret)}
                drafter = drafter.model_copy(update={"settings": pool})
            dial = Dial(tuple(linked.values()))
            launch = drafter_launch(name, name, drafter, _TARGET, dial)
            await self._start(launch, Role.DRAFTER)
        await self.processes.until("the stack", self._is_ready)

    async def _start_redis(self) -> str:
        """Start Redis; return its URL for the drafters that share it, or "" if it is absent."""
        if "redis" in self._absent:
            return ""
        self._redis_port = free_port()
        place = ("--bind", LOOPBACK, "--port", str(self._redis_port), "--protected-mode", "no")
        # Redis writes to the disk only during a fault, and only in the campaign's folder.
        disk = ("--save", "", "--appendonly", "no", "--dir", str(self._directory))
        await self._start(Launch("redis", "", (*place, *disk), program="redis-server"))
        front = await self._link("redis", f"{LOOPBACK}:{self._redis_port}")
        return f"redis://{front}/0"

    async def _start_verifier(self, name: str) -> None:
        address = f"{LOOPBACK}:{free_port()}"
        metrics_port = free_port()
        endpoint = Endpoint(name, str(_TARGET.model), 0, metrics_port, address)
        launch = verifier_launch(_TARGET, _TARGET.model, endpoint)
        await self._start(launch, Role.VERIFIER)
        self._verifiers.append(endpoint)

    async def _start_gateway(self, name: str, verifiers: str) -> None:
        port, grpc_port = free_port(), free_port()
        endpoint = Endpoint(name, "", port, 0, verifiers)
        launch = gateway_launch(endpoint, _TARGET.model, grpc_port)
        await self._start(launch, Role.GATEWAY)
        scheme = "http" if self._certificates is None else "https"
        self.gateways[name] = f"{scheme}://{LOOPBACK}:{port}"

    async def _start(self, launch: Launch, role: Role | None = None) -> None:
        """Start a process; if it has a role and the stack uses TLS, it gets a certificate."""
        if role is not None and self._certificates is not None:
            launch = self._certificates.given_to(launch, role)
        await self.processes.start(launch)

    async def _link(self, name: str, target: str) -> str:
        """Start a link to one target; return the address at which it listens."""
        return (await self._links(name, [target]))[target]

    async def _links(self, name: str, targets: list[str]) -> dict[str, str]:
        """Start a link; return, for each target, the address at which the link listens."""
        control, fronts = await start_link(self.processes, name, targets)
        self.links[f"link-{name}"] = control
        return fronts

    def pid(self, name: str) -> int:
        """Return the id of a process."""
        return self.processes.child(name).pid

    async def down(self, names: Collection[str], seconds: float, *, kill: bool) -> None:
        """Kill or stop processes, and start them again after some seconds."""
        if kill:
            await asyncio.gather(*(self.processes.child(name).kill() for name in names))
        await asyncio.gather(*(self.processes.end(name) for name in names))
        await asyncio.sleep(seconds)
        for name in names:
            await self.processes.again(name)

    async def freeze(self, names: Iterable[str], seconds: float) -> None:
        """Stop processes by SIGSTOP for some seconds."""
        handles = [self.processes.child(name) for name in names]
        for handle in handles:
            await handle.pause()
        await asyncio.sleep(seconds)
        for handle in handles:
            await handle.resume()

    async def limit(self, name: str, what: int, most: int, seconds: float) -> None:
        """Set a soft resource limit of a process, and restore it after some seconds."""
        pid = self.pid(name)
        before = resource.prlimit(pid, what)
        resource.prlimit(pid, what, (most, before[1]))
        await asyncio.sleep(seconds)
        # The process may have ended.
        with suppress(ProcessLookupError):
            resource.prlimit(pid, what, before)

    async def start_again_if_ended(self, name: str) -> None:
        """Restart a process if the fault has ended it."""
        if not await self.processes.child(name).alive():
            await self.processes.end(name)
            await self.processes.again(name)

    async def attack(self, way: str, seconds: float) -> None:
        """Let a hostile drafter act in this way for some seconds, at both verifiers."""
        addresses = [endpoint.verifier for endpoint in self._verifiers]
        module = "outrider_bench.chaos.hostile_drafter"
        await self._start(Launch("hostile", module, (way, *addresses)), Role.DRAFTER)
        await asyncio.sleep(seconds)
        handle = self.processes.child("hostile")
        if not await handle.alive():
            raise StackFailed(f"the hostile drafter ended: {(await handle.tail())[-5:]}")
        await handle.kill()
        await self.processes.end("hostile")

    def redis(self) -> Redis:
        """Return a client that reaches Redis directly, not over the link."""
        return Redis(host=LOOPBACK, port=self._redis_port, socket_timeout=_ASK_S)

    async def recovered(self) -> str:
        """Wait until the stack is complete; return the parts that are missing after 90 s."""
        if await within(_RECOVERS_S, self._is_ready):
            return ""
        return "; ".join(await self._missing()) or "it was complete only after the time limit"

    async def _is_ready(self) -> bool:
        return not await self._missing()

    async def _missing(self) -> list[str]:
        """List missing parts: each gateway needs two ready verifiers, each with all drafters."""
        found = []
        for name, url in self.gateways.items():
            try:
                states = (await self._http.get(f"{url}/readyz")).json()["verifiers"]
            except (httpx.TransportError, ValueError) as error:
                found.append(f"{name} does not answer: {error!r}")
                continue
            if len(states) < len(VERIFIERS):
                found.append(f"{name} shows {len(states)} verifiers")
            found += [f"{name}: {what}" for state in states for what in self._lacks(state)]
        return found

    def _lacks(self, state: Mapping[str, Any]) -> list[str]:
        """List the parts that one verifier lacks in the `state` that a gateway reports."""
        where = state["address"]
        if not state["ready"]:
            return [f"{where} is not ready: {state['problem']}"]
        ids = {drafter["id"] for drafter in state.get("drafters", ()) if drafter["connected"]}
        return [f"{where} has no drafter {name}" for name in self._drafters if name not in ids]

    async def revive(self) -> list[str]:
        """Restart processes that ended unexpectedly; return their names and last lines."""
        found = []
        for name in [*self._names(), *self.links]:
            handle = self.processes.child(name)
            if not await handle.alive():
                found.append(f"{name} ended: {(await handle.tail())[-5:]}")
                await self.processes.end(name)
                await self.processes.again(name)
        return found

    def _names(self) -> list[str]:
        redis = ["redis"] if self._redis_port else []
        return [*VERIFIERS, *GATEWAYS, *self._drafters, *redis]

    async def quiet(self) -> dict[str, Any]:
        """Return the metrics that are not 0 although no request runs, and each process's size.

        Waits for at most 20 s until all these metrics are 0.
        """

        async def is_quiet() -> bool:
            return not await self._in_use()

        in_use = {}
        if not await within(_QUIET_S, is_quiet):
            in_use = await self._in_use()
        alive = [name for name in self._names() if await self.processes.child(name).alive()]
        sizes = {name: size_of(self.pid(name)) for name in alive}
        return {"in_use": in_use, "processes": sizes}

    async def _in_use(self) -> dict[str, float]:
        urls = dict(self.gateways)
        urls |= {one.name: f"http://{LOOPBACK}:{one.metrics_port}" for one in self._verifiers}
        return await in_use(self._http, urls)

    async def stop(self) -> None:
        """Stop all processes."""
        await self.processes.stop()
        await self._http.aclose()


@asynccontextmanager
async def running_site(absent: frozenset[str], *, tls: bool) -> AsyncIterator[Site]:
    """Run the stack without the `absent` parts during the context.

    Raises StackFailed if the stack does not start.
    """
    with tempfile.TemporaryDirectory(prefix="outrider-chaos-") as directory:
        site = Site(absent, Path(directory), tls=tls)
        try:
            await site.start()
            yield site
        finally:
            await asyncio.shield(site.stop())
