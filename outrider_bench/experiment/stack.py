"""Decides which processes a cell needs, and in which order; `Processes` starts them.

A cell is a combination of an experiment's settings. `server` starts a verifier with its gateway,
`drafting` starts links and drafters, and `run.py` runs `drafting` within `server`. The server stays
while drafters and links come and go, so in each repetition, cells with the same target need only
one start of a server.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from outrider.errors import invalid
from outrider.gguf import pretrained
from outrider.process.network.ports import free_port
from outrider_bench.experiment.child import LOOPBACK
from outrider_bench.experiment.launches import (
    HEAD,
    Dial,
    Endpoint,
    drafter_count,
    drafter_launch,
    gateway_launch,
    in_process_drafter,
    link_launch,
    process_names,
    verifier_launch,
)
from outrider_bench.experiment.link_process import LinkControl
from outrider_bench.experiment.processes import Processes
from outrider_bench.experiment.records import LinkTraffic
from outrider_bench.experiment.spec import Drafter, Experiment, Link, Target, drafters_of
from outrider_cli.drafter_spec import DrafterSpec, settings_of
from outrider_cli.stack_plan import gpu_of

_ASK_S = 5.0


@dataclass(slots=True)
class Server:
    """A running verifier and its gateway."""

    target: Target
    """The target as it runs: its `model` is the grown checkpoint, if there is one."""
    endpoint: Endpoint
    processes: Processes
    in_process_drafter_count: int = 0
    """The number of drafters in the verifier's own process."""

    async def has_drafters(self, count: int) -> bool:
        """Return whether the gateway is ready and the verifier has exactly `count` drafters."""
        # Reading the system's certificates would occupy the cores on which processes start.
        async with httpx.AsyncClient(timeout=_ASK_S, verify=False) as client:
            return await _is_ready(client, self.endpoint.url, count)


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
async def server(
    target: Target, model: Path, in_process: Sequence[DrafterSpec] = ()
) -> AsyncIterator[Server]:
    """Run a verifier and its gateway during the context.

    The drafters of the list `in_process` run in the verifier's process. Raises StackFailed if
    verifier or gateway fails.
    """
    processes = Processes()
    with tempfile.TemporaryDirectory(prefix="outrider-experiment-") as sockets:
        try:
            endpoint = Endpoint(
                "verifier-1",
                str(target.model),
                free_port(),
                free_port(),
                f"{LOOPBACK}:{free_port()}",
                Path(sockets, "verifier-1.sock"),
            )
            await processes.start(verifier_launch(target, model, endpoint, in_process))
            await processes.start(gateway_launch(endpoint, model, free_port()))
            as_run = target.model_copy(update={"model": model})
            running = Server(as_run, endpoint, processes, len(in_process))
            await processes.until(
                "the verifier", lambda: running.has_drafters(running.in_process_drafter_count)
            )
            yield running
        finally:
            await asyncio.shield(processes.stop())


@dataclass(slots=True)
class Drafting:
    """Running drafters of a cell, with their links."""

    experiment: Experiment
    server: Server
    processes: Processes = field(default_factory=Processes)
    links: dict[str, LinkControl] = field(default_factory=dict)
    _shapes: dict[str, Link] = field(default_factory=dict)

    async def start(self) -> None:
        """Start the links, then the drafters."""
        verifier = self.server.endpoint.verifier
        # Maps each link to the address by which drafters reach the verifier over the link.
        fronts: dict[str | None, str] = {None: verifier}
        used = [drafter.link for _, drafter in drafters_of(self.experiment)]
        for link in dict.fromkeys(link for link in used if link is not None):
            self.links[link], started = await start_link(self.processes, link, [verifier])
            fronts[link] = started[verifier]
        for name, drafter in drafters_of(self.experiment):
            uds = self.server.endpoint.uds if drafter.transport == "unix" else None
            for process in process_names(name, drafter):
                await self._start_drafter(name, process, Dial((fronts[drafter.link],), uds))

    async def _start_drafter(self, name: str, process: str, dial: Dial) -> None:
        drafter = self.experiment.drafters[name]
        target = self.server.target
        drafter = _grown(drafter, self.experiment.target, target.model)
        launch = drafter_launch(f"drafters.{name}", process, drafter, target, dial)
        await self.processes.start(launch)

    async def shape(self, experiment: Experiment) -> None:
        """Set the links to the shapes of this cell, and wait until every drafter is connected.

        Drafters behind a changed link connect anew: the verifier then forgets what it measured over
        the link's earlier shape.
        """
        for name, control in self.links.items():
            link = experiment.links[name]
            await control.shape(link)
            if self._shapes.setdefault(name, link) != link:
                self._shapes[name] = link
                await self._reconnect(name, control)
        count = drafter_count(self.experiment)
        await self.server.processes.check()
        await self.processes.until("the drafters", lambda: self.server.has_drafters(count))

    async def _reconnect(self, name: str, control: LinkControl) -> None:
        """Cut a link's connections, and wait for a new connection."""
        before = (await control.traffic()).connection_count
        await control.reset()

        async def connected() -> bool:
            return (await control.traffic()).connection_count > before

        await self.processes.until(f"link {name}", connected)

    async def traffic(self) -> dict[str, LinkTraffic]:
        """Return the traffic of each link since its start."""
        return {name: await control.traffic() for name, control in self.links.items()}


@asynccontextmanager
async def drafting(experiment: Experiment, server: Server) -> AsyncIterator[Drafting]:
    """Run the drafters of a cell during the context. Raises StackFailed if one fails."""
    running = Drafting(experiment, server)
    try:
        await running.start()
        await running.shape(experiment)
        yield running
    finally:
        await asyncio.shield(running.processes.stop())
    # The next measurement has no drafters, so wait until the verifier has lost them.
    in_process_count = server.in_process_drafter_count
    await server.processes.until("the verifier", lambda: server.has_drafters(in_process_count))


def in_process_drafters(experiment: Experiment, model: Path) -> list[DrafterSpec]:
    """Return the drafters that run in the verifier's process.

    `model` is the directory of the target's model. If the target is grown, the heads are grown too.
    """
    return [
        in_process_drafter(f"drafters.{name}", name, _grown(drafter, experiment.target, model))
        for name, drafter in drafters_of(experiment)
        if drafter.in_process
    ]


def _grown(drafter: Drafter, target: Target, model: Path) -> Drafter:
    """Return the drafter for a target that runs as `model`; a grown target needs a grown head."""
    if drafter.family != "head" or not target.grown:
        return drafter
    from outrider_bench.grown import grown_head

    head = grown_head(drafter.model or HEAD, target.model, model)
    return drafter.model_copy(update={"model": head})


async def start_link(
    processes: Processes, name: str, targets: list[str]
) -> tuple[LinkControl, dict[str, str]]:
    """Start a link; return its control and, for each target, the address where the link listens."""
    fronts = {target: f"{LOOPBACK}:{free_port()}" for target in targets}
    control_port = free_port()
    forwards = {front: target for target, front in fronts.items()}
    await processes.start(link_launch(name, f"{LOOPBACK}:{control_port}", forwards))
    control = LinkControl(LOOPBACK, control_port)
    await processes.until(f"link {name}", lambda: _is_up(control))
    return control, fronts


async def _is_up(control: LinkControl) -> bool:
    try:
        await control.traffic()
    except ConnectionError:
        return False
    return True


def check(experiment: Experiment) -> None:
    """Check that a cell's processes can be started, without starting any.

    Raises OutriderError(INVALID_VALUE) that names the field of the file and the problem.
    """
    uds = Path("/nowhere/verifier.sock")
    endpoint = Endpoint("verifier-1", "", 1, 2, f"{LOOPBACK}:3", uds)
    for path, name in _models(experiment):
        if not Path(pretrained(str(path))).is_dir():
            raise invalid(name, f"must be a directory of a model, which {path} is not")
    target = experiment.target
    in_process = [
        in_process_drafter(f"drafters.{name}", name, drafter)
        for name, drafter in drafters_of(experiment)
        if drafter.in_process
    ]
    verifier_launch(target, target.model, endpoint, in_process)
    for name, drafter in drafters_of(experiment):
        if drafter.host is not None:
            problem = "can only be predicted; to measure, give the drafter a link with a round trip"
            raise invalid(f"drafters.{name}.host", problem)
        if drafter.in_process:
            continue
        dial = Dial((endpoint.verifier,), uds)
        drafter_launch(f"drafters.{name}", f"{name}-1", drafter, target, dial)
        _check_states(name, drafter, target)


def _check_states(name: str, drafter: Drafter, target: Target) -> None:
    """Refuse a drafter that would never join, since the target keeps no states for it."""
    if not settings_of(drafter.family).reads_states:
        return
    if target.settings.keys() & {"feature_states", "feature_projection"}:
        return
    on_gpu = gpu_of(str(target.settings.get("device", "auto"))) is not None
    if on_gpu or target.settings.get("engine") == "vllm":
        problem = (
            "reads states that CUDA graphs and vLLM keep only if target.settings names them,"
            ' as in feature_states: "2,16,29"; with transport in-process it needs none'
        )
        raise invalid(f"drafters.{name}", problem)


def _models(experiment: Experiment) -> Iterator[tuple[Path, str]]:
    yield experiment.target.model, "target.model"
    for name, drafter in drafters_of(experiment):
        if drafter.model is not None:
            yield drafter.model, f"drafters.{name}.model"
