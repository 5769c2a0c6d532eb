"""Makes one measurement: plays the load, and reads the verifier's counters before and after."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from operator import sub

import httpx

from outrider_bench.experiment.load import Asked, Played, digest, play
from outrider_bench.experiment.records import DRAFTED, LinkTraffic, Measurement
from outrider_bench.experiment.spec import Experiment
from outrider_bench.experiment.stack import Drafting, Server
from outrider_bench.experiment.traffic import Encoder, Request, requests_of, warm_up_of

_EXIT_S = 1.0


@dataclass(slots=True)
class Bench:
    """A running verifier, with or without drafters."""

    server: Server
    drafting: Drafting | None
    encoder: Encoder

    async def warm_up(self, experiment: Experiment, way: str) -> None:
        """Send requests that are not counted, so that the verifier learns the costs of steps."""
        requests = warm_up_of(experiment.workload, self.encoder)
        await self._play(requests, experiment, _asked(experiment, way, "warm-up"))

    async def measure(self, experiment: Experiment, way: str, tenant: str) -> Measurement:
        """Play the workload once; `tenant` must be new, so that no n-grams are known."""
        cpu_before = await self._cpu_s()
        traffic_before = await self._traffic()
        requests = requests_of(experiment.workload, self.encoder)
        played = await self._play(requests, experiment, _asked(experiment, way, tenant))
        return Measurement(
            way,
            played.sample,
            cpu_s=_grown(cpu_before, await self._cpu_s()),
            links=_carried(traffic_before, await self._traffic()),
            texts_sha256=digest(played),
            errors=played.errors,
        )

    async def _play(
        self, requests: Sequence[Request], experiment: Experiment, asked: Asked
    ) -> Played:
        """Play the requests; raise StackFailed if the verifier or its gateway ends meanwhile."""
        try:
            played = await play(requests, experiment.workload.batch, self.server.endpoint, asked)
        except httpx.TransportError:
            await self._check_processes()
            raise
        if played.errors:
            await self._check_processes()
        return played

    async def _check_processes(self) -> None:
        # A process that is about to exit resets its connections first.
        await asyncio.sleep(_EXIT_S)
        await self.server.processes.check()

    async def _cpu_s(self) -> dict[str, float]:
        found = await self.server.processes.cpu_s()
        if self.drafting is not None:
            found |= await self.drafting.processes.cpu_s()
        return {**found, "load": time.process_time()}

    async def _traffic(self) -> dict[str, LinkTraffic]:
        if self.drafting is not None:
            return await self.drafting.traffic()
        return {}


def _asked(experiment: Experiment, way: str, tenant: str) -> Asked:
    return Asked({"enabled": way == DRAFTED}, experiment.workload.temperature, tenant)


def _grown(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


def _carried(
    before: Mapping[str, LinkTraffic], after: Mapping[str, LinkTraffic]
) -> dict[str, LinkTraffic]:
    return {
        name: LinkTraffic(*map(sub, astuple(now), astuple(before[name])))
        for name, now in after.items()
    }
