"""One measurement: the load on the verifier, and the counters before and after."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from operator import sub

from outrider_bench.experiment.launches import SYNTHETIC
from outrider_bench.experiment.load import LEARNING, Asked, Played, digest, play
from outrider_bench.experiment.records import DRAFTED, LinkTraffic, Measurement
from outrider_bench.experiment.spec import Experiment, drafters_of
from outrider_bench.experiment.stack import Drafting, Server
from outrider_bench.experiment.traffic import Encoder, requests_of, warm_up_of


@dataclass(slots=True)
class Bench:
    """A running verifier, with drafters beside it or without."""

    server: Server
    drafting: Drafting | None
    encoder: Encoder

    async def warm_up(self, experiment: Experiment, way: str) -> None:
        """Send requests that are not counted, so that the verifier learns the costs of steps."""
        if way == DRAFTED and any(each.family == SYNTHETIC for _, each in drafters_of(experiment)):
            # Such drafters repeat the texts of requests that they have seen.
            learning = replace(_asked(experiment, way, "learning"), speculation=LEARNING)
            await self._play(experiment, learning)
            await self._warm_up(experiment, learning)
        await self._warm_up(experiment, _asked(experiment, way, "warm-up"))

    async def _warm_up(self, experiment: Experiment, asked: Asked) -> None:
        workload = experiment.workload
        requests = warm_up_of(workload, self.encoder)
        closed = workload.model_copy(update={"arrivals": "closed", "batch": workload.under_way})
        await play(requests, closed, self.server.endpoint, asked)

    async def measure(self, experiment: Experiment, way: str, tenant: str) -> Measurement:
        """Play the workload once; `tenant` must be new, so that no n-grams are known."""
        cpu_before = await self._cpu_s()
        traffic_before = await self._traffic()
        played = await self._play(experiment, _asked(experiment, way, tenant))
        return Measurement(
            way,
            played.sample,
            cpu_s=_grown(cpu_before, await self._cpu_s()),
            links=_carried(traffic_before, await self._traffic()),
            texts_sha256=digest(played),
            errors=played.errors,
        )

    async def _play(self, experiment: Experiment, asked: Asked) -> Played:
        workload = experiment.workload
        requests = requests_of(workload, self.encoder)
        return await play(requests, workload, self.server.endpoint, asked)

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
