"""The stack of a campaign: two verifiers, a gateway and two drafters, with links between them."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from redis.asyncio import Redis

from outrider_bench.experiment.hosts import LOOPBACK, Launch, LocalHandle, LocalHost
from outrider_bench.experiment.launches import (
    Dial,
    Endpoint,
    drafter_launch,
    gateway_launch,
    link_launch,
    redis_launch,
    verifier_launch,
)
from outrider_bench.experiment.link_process import LinkControl
from outrider_bench.experiment.processes import Processes, StackFailed
from outrider_bench.experiment.spec import Drafter, Target

BOTH = ("verifier-1", "verifier-2")
DRAFTERS = {
    "ngram": Drafter.model_validate({"family": "ngram"}),
    "model": Drafter.model_validate({"family": "model", "threads": 1}),
}
# So few pages that a crowd of clients waits for them, and loses them to others.
_TARGET = Target.model_validate({"threads": 1, "settings": {"page_count": 256}})
_ASK_S = 5.0
_LOOK_S = 0.2
_RECOVERS_S = 90.0
_QUIET_S = 20.0
_ZERO_WHEN_QUIET = (
    "outrider:num_requests_running",
    "outrider:num_requests_waiting",
    "outrider:kv_cache_usage_perc",
    "outrider:integrity_failures_total",
)
"""Metrics that are 0 while no request runs."""


def has_redis() -> bool:
    """Whether this machine has a Redis server; then the n-gram pool is in it."""
    return shutil.which("redis-server") is not None


class Site:
    """The running stack."""

    def __init__(self) -> None:
        self.links: dict[str, LinkControl] = {}
        self.processes = Processes()
        self._host = LocalHost()
        self._verifiers: list[Endpoint] = []
        self._gateway = Endpoint("gateway", "", LOOPBACK, 0, 0, "", None)
        self._redis_port = 0
        self._http = httpx.AsyncClient(
            timeout=_ASK_S,
            limits=httpx.Limits(max_keepalive_connections=0),
            verify=False,
            trust_env=False,
        )

    @property
    def port(self) -> int:
        """The gateway's HTTP port."""
        return self._gateway.http_port

    async def start(self) -> None:
        """Start all processes, and wait until they are ready; raises StackFailed."""
        redis = ""
        if has_redis():
            self._redis_port = await self._host.free_port()
            await self._start(redis_launch(LOOPBACK, self._redis_port))
            [redis] = await self._link("redis", [f"{LOOPBACK}:{self._redis_port}"])
        for name in BOTH:
            address = f"{LOOPBACK}:{await self._host.free_port()}"
            metrics_port = await self._host.free_port()
            model = str(_TARGET.model)
            endpoint = Endpoint(name, model, LOOPBACK, 0, metrics_port, address, None)
            await self._start(verifier_launch(_TARGET, _TARGET.model, endpoint, ""))
            self._verifiers.append(endpoint)
        addresses = [endpoint.verifier for endpoint in self._verifiers]
        fronts = [
            (await self._link(str(number), [to]))[0] for number, to in enumerate(addresses, 1)
        ]
        port, grpc_port = await self._host.free_port(), await self._host.free_port()
        self._gateway = Endpoint("gateway", "", LOOPBACK, port, 0, ",".join(fronts), None)
        await self._start(gateway_launch(self._gateway, _TARGET.model, grpc_port, ""))
        for name, drafter in DRAFTERS.items():
            uses_redis = redis if name == "ngram" and redis else None
            dial = Dial(
                tuple(await self._link(name, addresses)), None, uses_redis, secrets.token_hex(16)
            )
            await self._start(drafter_launch(name, name, drafter, _TARGET, dial, ""))
        await self.processes.until("the stack", self._is_ready)

    async def _start(self, launch: Launch) -> None:
        await self.processes.start(self._host, launch)

    async def _link(self, name: str, targets: Iterable[str]) -> list[str]:
        """Start a link; returns the addresses at which it listens for each target."""
        fronts = {f"{LOOPBACK}:{await self._host.free_port()}": target for target in targets}
        control = LinkControl(LOOPBACK, await self._host.free_port())
        launch = link_launch(name, f"{LOOPBACK}:{control.address[1]}", fronts)
        await self._start(launch)
        self.links[launch.name] = control
        return list(fronts)

    def pid(self, name: str) -> int:
        """The number of a process."""
        handle = self.processes.handle(name)
        # All of them run on this machine.
        assert isinstance(handle, LocalHandle)
        return handle.pid

    async def down(self, names: Collection[str], seconds: float, *, kill: bool) -> None:
        """Kill or stop processes, and start them again after some seconds."""
        await asyncio.gather(*(self.processes.end(name, kill=kill) for name in names))
        await asyncio.sleep(seconds)
        for name in names:
            await self.processes.again(name)

    async def freeze(self, names: Iterable[str], seconds: float) -> None:
        """Stop processes by SIGSTOP for some seconds."""
        handles = [self.processes.handle(name) for name in names]
        for handle in handles:
            await handle.pause()
        await asyncio.sleep(seconds)
        for handle in handles:
            await handle.resume()

    async def attack(self, way: str, seconds: float) -> None:
        """Let a drafter break the protocol for some seconds, at both verifiers."""
        addresses = [endpoint.verifier for endpoint in self._verifiers]
        module = "outrider_bench.chaos.hostile_drafter"
        await self._start(Launch("hostile", module, (way, *addresses)))
        await asyncio.sleep(seconds)
        handle = self.processes.handle("hostile")
        if not await handle.alive():
            raise StackFailed(f"the hostile drafter ended: {(await handle.tail())[-5:]}")
        await self.processes.end("hostile", kill=True)

    def redis(self) -> Redis:
        """A client of the Redis, around its link."""
        return Redis(host=LOOPBACK, port=self._redis_port, socket_timeout=_ASK_S)

    async def recovered(self) -> bool:
        """Whether both verifiers, each with both drafters, are ready again; waits for 90 s."""
        return await _within(_RECOVERS_S, self._is_ready)

    async def _is_ready(self) -> bool:
        try:
            body = (await self._http.get(f"{self._gateway.url}/readyz")).json()
        except (httpx.TransportError, ValueError):
            return False
        states = body["verifiers"]
        return len(states) == len(BOTH) and all(map(_is_whole, states))

    async def revive(self) -> list[str]:
        """Start the processes that ended by themselves; returns their names and last lines."""
        found = []
        for name in [*self._names(), *self.links]:
            handle = self.processes.handle(name)
            if not await handle.alive():
                found.append(f"{name} ended: {(await handle.tail())[-5:]}")
                await self.processes.end(name)
                await self.processes.again(name)
        return found

    def _names(self) -> list[str]:
        names = [*BOTH, "gateway", *DRAFTERS]
        return [*names, "redis"] if self._redis_port else names

    async def quiet(self) -> dict[str, Any]:
        """Metrics that are not 0 once no request runs, and each process' size.

        Waits for at most 20 s until all these metrics are 0.
        """

        async def is_quiet() -> bool:
            return not await self._in_use()

        in_use = {}
        if not await _within(_QUIET_S, is_quiet):
            in_use = await self._in_use()
        alive = [name for name in self._names() if await self.processes.handle(name).alive()]
        sizes = {name: _size(self.pid(name)) for name in alive}
        return {"in_use": in_use, "processes": sizes}

    async def _in_use(self) -> dict[str, float]:
        urls = {"gateway": self._gateway.url}
        urls |= {one.name: f"http://{LOOPBACK}:{one.metrics_port}" for one in self._verifiers}
        found = {}
        for name, url in urls.items():
            try:
                text = (await self._http.get(f"{url}/metrics")).text
            except httpx.TransportError:
                found[f"{name} answers no /metrics"] = 1.0
                continue
            samples = [s for f in text_string_to_metric_families(text) for s in f.samples]
            for sample in samples:
                if sample.name in _ZERO_WHEN_QUIET and sample.value:
                    found[f"{name} {sample.name}"] = sample.value
        return found

    async def stop(self) -> None:
        """Stop all processes."""
        await self.processes.stop()
        await self._http.aclose()


async def _within(seconds: float, holds: Callable[[], Awaitable[bool]]) -> bool:
    """Whether the condition holds within some seconds."""
    until = time.monotonic() + seconds
    while not await holds():
        if time.monotonic() > until:
            return False
        await asyncio.sleep(_LOOK_S)
    return True


def _is_whole(state: Mapping[str, Any]) -> bool:
    """Whether a verifier is ready and has all its drafters."""
    drafters = state.get("drafters", ())
    connected = {drafter["id"] for drafter in drafters if drafter["connected"]}
    return bool(state["ready"]) and connected.issuperset(DRAFTERS)


def _size(pid: int) -> dict[str, float]:
    """Open files, threads and resident memory of a process of this machine."""
    place = Path("/proc", str(pid))
    pages = int((place / "statm").read_text().split()[1])
    return {
        "pid": pid,
        "files": len(os.listdir(place / "fd")),
        "threads": len(os.listdir(place / "task")),
        "mebibytes": round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1),
    }


@asynccontextmanager
async def running_site() -> AsyncIterator[Site]:
    """The stack, until the context ends; raises StackFailed if it does not start."""
    site = Site()
    try:
        await site.start()
        yield site
    finally:
        await asyncio.shield(site.stop())
