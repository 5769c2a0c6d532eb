"""Says which processes a cell needs, and in which order; `Processes` starts them.

`servers` starts verifiers with a gateway each, `drafting` links and drafters, and `run.py` nests
the two. Servers stay while drafters and links come and go, so cells with one target need one start
of them.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx

from outrider.errors import invalid
from outrider_bench.experiment.hosts import LOOPBACK, Host
from outrider_bench.experiment.launches import (
    HEAD,
    Dial,
    Endpoint,
    drafter_launch,
    drafters_at_each,
    gateway_launch,
    link_launch,
    process_names,
    verifier_launch,
)
from outrider_bench.experiment.link_process import LinkControl
from outrider_bench.experiment.places import Places
from outrider_bench.experiment.processes import Processes
from outrider_bench.experiment.records import LinkTraffic
from outrider_bench.experiment.spec import Drafter, Experiment, Link, Target, drafters_of

_ASK_S = 5.0


@dataclass(slots=True)
class Servers:
    """Running verifiers and their gateways."""

    target: Target
    """As it runs: its `model` is the grown checkpoint, if there is one."""
    endpoints: list[Endpoint]
    processes: Processes
    own_drafter_count: int = 0
    """Drafters in each verifier's own process."""

    async def has_drafters(self, count: int) -> bool:
        """Whether every gateway is ready and `count` drafters are connected to its verifier."""
        # Reading the system's certificates would take the cores on which processes start.
        async with httpx.AsyncClient(timeout=_ASK_S, verify=False) as client:
            ready = [await _is_ready(client, endpoint.url, count) for endpoint in self.endpoints]
            return all(ready)


async def _is_ready(client: httpx.AsyncClient, url: str, count: int) -> bool:
    try:
        body = (await client.get(f"{url}/readyz")).json()
    except (httpx.TransportError, ValueError):
        return False
    if body["status"] not in ("ready", "degraded"):
        return False
    connected = [
        drafter
        for verifier in body["verifiers"]
        for drafter in verifier.get("drafters", ())
        if drafter["connected"]
    ]
    return len(connected) == count


@asynccontextmanager
async def servers(
    target: Target, model: Path, places: Places, head: Path | None = None
) -> AsyncIterator[Servers]:
    """Verifiers without drafters, until the context ends; raises StackFailed if one fails.

    With a `head`, each has this drafter in its process.
    """
    processes = Processes()
    with tempfile.TemporaryDirectory(prefix="outrider-experiment-") as sockets:
        try:
            endpoints = []
            for number in range(1, target.count + 1):
                name = f"verifier-{number}"
                host = places.host(name, target.host)
                front = places.host(name.replace("verifier", "gateway"), target.host)
                endpoint = Endpoint(
                    name,
                    str(target.model),
                    await front.free_port(),
                    await host.free_port(),
                    f"{host.address}:{await host.free_port()}",
                    Path(sockets, f"{name}.sock") if target.host is None else None,
                    host.bind,
                )
                await processes.start(host, verifier_launch(target, model, endpoint, head))
                gateway = gateway_launch(endpoint, model, await front.free_port())
                await processes.start(front, gateway)
                endpoints.append(replace(endpoint, gateway_at=front.here, verifier_at=host.here))
            as_run = target.model_copy(update={"model": model})
            running = Servers(as_run, endpoints, processes, int(head is not None))
            await processes.until(
                "the verifiers", lambda: running.has_drafters(running.own_drafter_count)
            )
            yield running
        finally:
            await asyncio.shield(processes.stop())


@dataclass(slots=True)
class Drafting:
    """Running drafters of a cell, with their links."""

    experiment: Experiment
    servers: Servers
    _places: Places
    processes: Processes = field(default_factory=Processes)
    links: dict[str, LinkControl] = field(default_factory=dict)
    _shapes: dict[str, Link] = field(default_factory=dict)

    async def start(self) -> None:
        """Start the links, then the drafters."""
        verifiers = [endpoint.verifier for endpoint in self.servers.endpoints]
        # By link, the link's address for each verifier.
        fronts = {}
        used = [drafter.link for _, drafter in drafters_of(self.experiment)]
        for link in dict.fromkeys(link for link in used if link is not None):
            host = self._places.host(f"link-{link}", None)
            started = await start_link(self.processes, host, link, verifiers)
            self.links[link], fronts[link] = started
        for name, drafter in drafters_of(self.experiment):
            for place, process in enumerate(process_names(self.experiment, name)):
                await self._start_drafter(name, process, self._dial(drafter, place, fronts))

    def _dial(self, drafter: Drafter, place: int, fronts: dict[str, dict[str, str]]) -> Dial:
        """The addresses that a drafter's process dials; `place` is its number in the stack."""
        endpoints = self.servers.endpoints
        mine = endpoints
        if not drafter.shared:
            mine = [endpoints[place // drafter.count]]
        to_verifiers = fronts.get(drafter.link or "", {})
        return Dial(
            tuple(to_verifiers.get(endpoint.verifier, endpoint.verifier) for endpoint in mine),
            mine[0].uds if drafter.transport == "unix" else None,
        )

    async def _start_drafter(self, name: str, process: str, dial: Dial) -> None:
        drafter = self.experiment.drafters[name]
        target = self.servers.target
        if drafter.family == "head":
            head = _head_of(drafter, self.experiment.target, target.model)
            drafter = drafter.model_copy(update={"model": head})
        host = self._places.host(process, drafter.host)
        launch = drafter_launch(f"drafters.{name}", process, drafter, target, dial)
        await self.processes.start(host, launch)

    async def shape(self, experiment: Experiment) -> None:
        """Give the links the shapes of this cell, and wait until every drafter is connected.

        Drafters behind a link that changes connect anew, so that a verifier starts each cell with
        nothing learned over another link.
        """
        for name, control in self.links.items():
            link = experiment.links[name]
            await control.shape(link)
            if self._shapes.setdefault(name, link) != link:
                self._shapes[name] = link
                await self._reconnect(name, control)
        count = drafters_at_each(self.experiment)
        await self.servers.processes.check()
        await self.processes.until("the drafters", lambda: self.servers.has_drafters(count))

    async def _reconnect(self, name: str, control: LinkControl) -> None:
        """Cut a link's connections, and go on when there is a new one."""
        before = (await control.traffic()).connection_count
        await control.reset()

        async def connected() -> bool:
            return (await control.traffic()).connection_count > before

        await self.processes.until(f"link {name}", connected)

    async def traffic(self) -> dict[str, LinkTraffic]:
        """The traffic of each link since its start."""
        return {name: await control.traffic() for name, control in self.links.items()}


@asynccontextmanager
async def drafting(
    experiment: Experiment, servers: Servers, places: Places
) -> AsyncIterator[Drafting]:
    """The drafters of a cell, until the context ends; raises StackFailed if one fails."""
    running = Drafting(experiment, servers, places)
    try:
        await running.start()
        await running.shape(experiment)
        yield running
    finally:
        await asyncio.shield(running.processes.stop())
    # The next measurement has no drafters, so wait until the verifiers have lost them.
    own_count = servers.own_drafter_count
    await servers.processes.until("the verifiers", lambda: servers.has_drafters(own_count))


def own_head(experiment: Experiment, model: Path) -> Path | None:
    """Directory of the head in the verifiers' process; None if there is none.

    `model` is the target's as it runs. For a grown one, the head is made.
    """
    own = [drafter for _, drafter in drafters_of(experiment) if drafter.in_process]
    return _head_of(own[0], experiment.target, model) if own else None


def _head_of(drafter: Drafter, target: Target, model: Path) -> Path:
    head = drafter.model or HEAD
    if not target.grown:
        return head
    from outrider_bench.grown import grown_head

    return grown_head(head, target.model, model)


async def start_link(
    processes: Processes, host: Host, name: str, targets: list[str]
) -> tuple[LinkControl, dict[str, str]]:
    """Start a link; returns its control, and the address at which it listens for each target."""
    ports = {target: await host.free_port() for target in targets}
    control_port = await host.free_port()
    forwards = {f"{host.bind}:{port}": target for target, port in ports.items()}
    await processes.start(host, link_launch(name, f"{host.bind}:{control_port}", forwards))
    control = LinkControl(host.here, control_port)
    await processes.until(f"link {name}", lambda: _is_up(control))
    return control, {target: f"{host.address}:{port}" for target, port in ports.items()}


async def _is_up(control: LinkControl) -> bool:
    try:
        await control.traffic()
    except ConnectionError:
        return False
    return True


def check(experiment: Experiment, places: Places) -> None:
    """Check that a cell's processes can be started, without starting any.

    Raises OutriderError(INVALID_VALUE) that names the field of the file and the problem.
    """
    uds = Path("/nowhere/verifier.sock")
    endpoint = Endpoint("verifier-1", "", 1, 2, f"{LOOPBACK}:3", uds)
    for path, name in _models(experiment):
        if not path.is_dir():
            raise invalid(name, f"must be a directory of a model, which {path} is not")
    places.host("verifier-1", experiment.target.host)
    own = [drafter.model or HEAD for _, drafter in drafters_of(experiment) if drafter.in_process]
    verifier_launch(experiment.target, experiment.target.model, endpoint, next(iter(own), None))
    for name, drafter in drafters_of(experiment):
        if drafter.in_process:
            continue
        places.host(f"{name}-1", drafter.host)
        count = 1
        if drafter.shared:
            count = experiment.target.count
        dial = Dial((endpoint.verifier,) * count, uds)
        drafter_launch(f"drafters.{name}", f"{name}-1", drafter, experiment.target, dial)


def _models(experiment: Experiment) -> Iterator[tuple[Path, str]]:
    if experiment.target.host is None:
        yield experiment.target.model, "target.model"
    for name, drafter in drafters_of(experiment):
        if drafter.model is not None and drafter.host is None:
            yield drafter.model, f"drafters.{name}.model"
