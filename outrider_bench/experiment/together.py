"""Measures the processor time of verifiers that serve together, and of all that serves beside them.

The load is plain decoding with spans, as in an experiment, but it is fixed and part of none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from outrider.tokenizer import load_tokenizer
from outrider_bench.experiment.hosts import LocalHandle, thread_cpu_s
from outrider_bench.experiment.measuring import Bench
from outrider_bench.experiment.places import Where, places
from outrider_bench.experiment.records import PLAIN
from outrider_bench.experiment.spans import receiver
from outrider_bench.experiment.spec import Experiment
from outrider_bench.experiment.stack import backend
from outrider_bench.simulator.costs import Costs

# Mean lengths of answers. Two lengths tell the cost of a request from that of a message.
_SHORT, _LONG = 16, 96
_MOST_VERIFIERS = 8


@dataclass(frozen=True, slots=True)
class Spent:
    """The processor time of a load, in seconds."""

    engine_s: float
    """Of the threads that compute the forwards."""
    front_s: float
    """Of all other threads of the verifiers, of the gateways and of the client."""
    seconds: float
    """From the first request to the last answer, of any process."""
    requests: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Loads:
    """The load with short and with long answers."""

    short: Spent
    long: Spent

    @property
    def engine_token_s(self) -> float:
        """Processor seconds of the engine for a token."""
        return self.long.engine_s / self.long.tokens

    @property
    def front_message_s(self) -> float:
        """Processor seconds beside the engine for a message, which has one token."""
        more_s = self.long.front_s - self.short.front_s
        return max(more_s / (self.long.tokens - self.short.tokens), 0.0)

    @property
    def front_request_s(self) -> float:
        """Processor seconds beside the engine for a request, without its messages."""
        rest_s = self.short.front_s - self.front_message_s * self.short.tokens
        return max(rest_s / self.short.requests, 0.0)


def measure(costs: Costs, target: Path, dtype: str, threads: int, core_count: int) -> Costs:
    """The table with what verifiers that serve together cost each other, and what serving costs.

    Serves with 1, 2, 4 and so on verifiers, as many as have `threads` cores each. Takes about half
    a minute on two cores. Raises RuntimeError if a request fails.
    """
    counts = [1]
    while 2 * counts[-1] <= min(core_count // threads, _MOST_VERIFIERS):
        counts.append(2 * counts[-1])
    found = {count: asyncio.run(_serve(target, dtype, threads, count)) for count in counts}
    return with_loads(costs, found, threads)


def with_loads(costs: Costs, loads: Mapping[int, Loads], threads: int) -> Costs:
    """The table with the figures of the loads, by their number of verifiers; 1 must be among them.

    The costs beside the engine are those with the most verifiers, which fill the cores.
    """
    fullest = loads[max(loads)]
    return costs.model_copy(
        update={
            "concurrent": {
                count: _slowdown(loads[1], each, count, threads) for count, each in loads.items()
            },
            "front_request_s": fullest.front_request_s,
            "front_message_s": fullest.front_message_s,
        }
    )


def _slowdown(alone: Loads, loads: Loads, count: int, threads: int) -> float:
    """How many times longer a forward takes while `count` have cores.

    In the load fewer than `count` had cores on average, since the rest of serving takes its turns.
    """
    if count == 1:
        return 1.0
    # A copy cannot make a forward quicker; less is chance.
    found = max(loads.engine_token_s / alone.engine_token_s, 1.0)
    others = loads.long.engine_s / (threads * loads.long.seconds) - 1.0
    # Other work on the machine takes turns as well, so at least half of the others count.
    others = min(max(others, (count - 1) / 2), count - 1)
    return 1.0 + (found - 1.0) * (count - 1) / others


async def _serve(target: Path, dtype: str, threads: int, count: int) -> Loads:
    short, long = (_experiment(target, dtype, threads, count, tokens) for tokens in (_SHORT, _LONG))
    async with (
        places([long], Where(), "") as found,
        receiver(found.here) as spans,
        backend(long.target, target, found, spans.endpoint) as running,
    ):
        bench = Bench(running, None, load_tokenizer(str(target)), spans)
        await bench.warm_up(short, PLAIN)
        return Loads(await _spent(bench, short, threads), await _spent(bench, long, threads))


def _experiment(target: Path, dtype: str, threads: int, count: int, tokens: int) -> Experiment:
    return Experiment.model_validate(
        {
            "name": "together",
            "question": "What do verifiers that serve together cost each other?",
            "target": {"model": target, "dtype": dtype, "threads": threads, "count": count},
            "workload": {"output_tokens": tokens},
        }
    )


async def _spent(bench: Bench, experiment: Experiment, threads: int) -> Spent:
    before = _verifier_threads(bench)
    found = await bench.measure(experiment, PLAIN, f"tokens-{experiment.workload.output_tokens}")
    after = _verifier_threads(bench)
    if found.errors:
        raise RuntimeError(f"a request of the profile's load failed: {found.errors[0]}")
    engine_s = sum(
        [
            sum(sorted([now[thread] - then.get(thread, 0.0) for thread in now])[-threads:])
            for then, now in zip(before, after, strict=True)
        ]
    )
    return Spent(
        engine_s,
        sum(found.cpu_s.values()) - engine_s,
        max([sample.seconds for sample in found.samples]),
        sum([len(sample.requests) for sample in found.samples]),
        sum([sample.tokens for sample in found.samples]),
    )


def _verifier_threads(bench: Bench) -> list[dict[int, float]]:
    """The processor seconds of each verifier's threads so far."""
    processes = bench.backend.processes
    handles = [processes.handle(endpoint.name) for endpoint in bench.backend.endpoints]
    return [thread_cpu_s(handle.pid) for handle in handles if isinstance(handle, LocalHandle)]
