"""Measures what serving costs besides forwards, with a fixed load on the whole stack.

The load is the same for all predictions: 1 or 8 requests are in progress at any time. The load is
decoded in three ways: plainly, with an n-gram drafter, and with a draft model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import mean, median
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from outrider.drafter.grpc_transport import wait_until_ready
from outrider.process.network import rpc
from outrider_bench.experiment.launches import Endpoint
from outrider_bench.experiment.load import Asked, play
from outrider_bench.experiment.report.figures import PHASES
from outrider_bench.experiment.spec import Experiment, Workload
from outrider_bench.experiment.stack import drafting, server
from outrider_bench.experiment.traffic import Encoder, Request, requests_of
from outrider_bench.sample import Sample
from outrider_bench.simulator.costs import NotNegative

BATCHES = (1, 8)
WAYS: dict[str, dict[str, str | bool]] = {
    "plain": {"enabled": False},
    "ngram": {"drafter_family": "ngram"},
    "model": {"drafter_family": "model"},
}
_TOKENS = 64
_ROUNDS = 3


class Step(BaseModel):
    """The mean step of an engine over a load: seconds and counts."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    forward_s: float = Field(gt=0)
    before_s: float = Field(ge=0)
    """The host's work before the forward, and the verification's layout, for which no GPU waits."""
    after_s: float = Field(ge=0)
    """The host's work after the forward."""
    wait_s: float = Field(ge=0)
    """The time until the step begins: planning, and waiting for drafts."""
    between_s: float = Field(ge=0)
    """The time between the end of a step and the beginning of the next step."""
    sequences: float = Field(gt=0)
    draft_tokens: float = Field(ge=0)
    """Verified draft tokens of all sequences."""
    drafts: float = Field(ge=0)
    """Verified drafts."""
    answer_s: float = Field(ge=0)
    """Mean seconds from a verdict to a draft that answers it."""
    prompts: float = Field(ge=0)
    prompt_tokens: float = Field(ge=0)


class Served(BaseModel):
    """The figures of one decoding mode at one batch size."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    way: str
    batch: int = Field(ge=1)
    tokens_per_s: float = Field(gt=0)
    """The speed of the calibration load, to compare predictions with."""
    client_s: float = Field(ge=0)
    """Seconds from a client to the verifier; the way back takes as long. Both together are the part
    of the time to the first token that is spent outside the verifier."""
    round_trip_s: NotNegative = 0.0
    """Seconds from a verdict to the draft for it, drafting excluded; the verifier measures them."""
    draft_token_s: NotNegative = 0.0
    """Seconds of drafting a token; the verifier measures them."""
    step: Step


def calibrate(
    target: Path,
    draft: Path,
    dtype: str,
    threads: int,
    tell: Callable[[], None] = lambda: None,
) -> list[Served]:
    """Serve the load, and return its figures for each decoding mode and batch size.

    For the bundled pair this takes about two minutes. Calls `tell` each time the load has been
    played.
    """
    drafters = {
        "ngram": {"family": "ngram"},
        "model": {"family": "model", "model": draft, "threads": 1},
    }
    experiment = Experiment.model_validate(
        {
            "name": "profile",
            "target": {"model": target, "dtype": dtype, "threads": threads},
            "drafters": drafters,
            "use": list(drafters),
        }
    )
    return asyncio.run(_serve(experiment, tell))


async def _serve(experiment: Experiment, tell: Callable[[], None]) -> list[Served]:
    samples: dict[tuple[str, int], list[Sample]] = {}
    speeds: dict[tuple[str, int], list[tuple[float, float]]] = {}
    target = experiment.target
    loads = {batch: load_of(target.model, batch) for batch in BATCHES}
    async with (
        server(target, target.model) as running,
        drafting(experiment, running),
    ):
        endpoint = running.endpoint
        # In the first round, planner and drafters learn the costs. That round does not count.
        for number in range(_ROUNDS + 1):
            for batch, load in loads.items():
                for name in ("plain", *experiment.use):
                    sample = await _played(load, batch, endpoint, WAYS[name])
                    tell()
                    if number:
                        samples.setdefault((name, batch), []).append(sample)
                        speeds.setdefault((name, batch), []).append(
                            await _speed(name, endpoint.verifier)
                        )
    return [
        _served(name, batch, found, speeds[name, batch]) for (name, batch), found in samples.items()
    ]


async def _played(
    load: list[Request], batch: int, endpoint: Endpoint, speculation: Mapping[str, Any]
) -> Sample:
    """Play a load at the gateway; raise RuntimeError with the first error of a request."""
    played = await play(load, batch, endpoint, Asked(speculation, 0.0, "profile"))
    if played.errors:
        raise RuntimeError(played.errors[0])
    return played.sample


async def _speed(family: str, address: str) -> tuple[float, float]:
    """Return the round trip and the seconds per draft token that the verifier measured.

    Both numbers are of the first drafter of `family`; without such a drafter they are 0.
    """
    async with rpc.dial(address) as channel:
        info = await wait_until_ready(channel)
    found = [
        (drafter.round_trip_s or 0.0, drafter.token_s or 0.0)
        for drafter in info.drafters
        if drafter.family == family
    ]
    if found:
        return found[0]
    return (0.0, 0.0)


def load_of(target: Path, batch: int) -> list[Request]:
    """Return the requests of a load that keeps `batch` requests in progress."""
    workload = Workload.model_validate(
        {"batch": batch, "output_tokens": _TOKENS, "waves": 8 if batch == 1 else 4}
    )
    return requests_of(workload, Encoder(target))


def _served(
    way: str, batch: int, samples: list[Sample], speeds: list[tuple[float, float]]
) -> Served:
    round_trips, token_times = zip(*speeds, strict=True)
    step = step_of(samples)
    within_s = sum(
        [_mean_s(samples, f"request_{name}_time_seconds") for name in ("queue", "prefill")]
    )
    first_s = median([ttft for sample in samples for ttft in sample.ttft])
    return Served(
        way=way,
        batch=batch,
        tokens_per_s=median(
            [sample.full_tokens_per_s or sample.tokens_per_s for sample in samples]
        ),
        client_s=max(0.0, first_s - within_s) / 2,
        round_trip_s=median(round_trips),
        draft_token_s=median(token_times),
        step=step,
    )


def step_of(samples: list[Sample]) -> Step:
    """Return the mean step of all samples."""

    def each(*names: str) -> float:
        """Return the sum of these counters for one step, averaged over the samples."""
        return mean(
            [
                sum([s.counters.get(name, 0.0) for name in names])
                / s.counters["step_seconds_count"]
                for s in samples
            ]
        )

    answers = each("draft_latency_seconds_count")
    phases = {name: each(f"step_phase_seconds.{name}") for name in PHASES}
    seconds = sum(phases.values())
    # The time between tokens is measured from the first to the last token of a request.
    tpot_s = median([tpot for sample in samples for tpot in sample.tpot])
    tokens = each("generation_tokens") / each("step_sequences_sum")
    return Step(
        forward_s=phases["forward"],
        before_s=phases["pack"],
        after_s=phases["accept"] + phases["commit"] + phases["send"],
        wait_s=phases["wait"],
        between_s=max(0.0, tpot_s * tokens - seconds),
        sequences=each("step_sequences_sum"),
        draft_tokens=each("spec_decode_num_draft_tokens"),
        drafts=each("spec_decode_num_drafts"),
        answer_s=each("draft_latency_seconds_sum") / answers if answers else 0.0,
        prompts=each("request_prefill_time_seconds_count"),
        prompt_tokens=each("prefix_cache_queries"),
    )


def _mean_s(samples: list[Sample], name: str) -> float:
    count = sum([sample.counters[f"{name}_count"] for sample in samples])
    return sum([sample.counters[f"{name}_sum"] for sample in samples]) / count
