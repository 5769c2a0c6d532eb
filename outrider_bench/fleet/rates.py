"""Rates of one verifier by its load, from the engine-level simulator.

A verifier with its drafters stands in the fleet as a flow-equivalent server: a queue whose rate
depends on the number of requests in it, and is that of the whole subsystem with so many requests
always under way (Chandy, Herzog and Woo, Parametric analysis of queuing networks, 1975). So depth
and waiting are decided by the production planner, and there is no second copy of its arithmetic.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError
from rich.progress import track

from outrider_bench.fleet.spec import Fleet
from outrider_bench.simulator import costs
from outrider_bench.simulator.scenario import Scenario

SLOWNESS = (0.5, 1.0, 2.0, 4.0)
"""Seconds of a draft pass, over those of one drafter that has all sequences of the verifier."""
QUANTILES = np.linspace(0.0, 1.0, 101)
_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096)
# A cell lasts for about `_REQUESTS` requests and `_WAVES` one after the other, but within these
# bounds of seconds, which limit the CPU time.
_REQUESTS = 300
_WAVES = 5
_LEAST_S = 10.0
_MOST_S = 150.0
_ROOT = Path(__file__).parents[2]
_SOURCES = ("verifier_svc/**/*.py", "outrider_bench/simulator/**/*.py", "outrider/drafter/**/*.py")


class Cell(BaseModel):
    """One verifier with `batch` requests always under way. Times are in seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tokens_per_s: float
    step_s: float
    """Time from one engine step to the next."""
    token_s: float
    """Mean time per output token of a request, the first left out."""
    busy: float
    """Share of the time in which the drafter drafts, running ahead included."""
    ttft_s: list[float]
    """Quantiles of the time to the first token, at `QUANTILES`."""
    stretch: list[float]
    """Quantiles of a request's time per output token, over `token_s`."""


class CellKey(BaseModel):
    """Which cell. Without a round trip it decodes plainly."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    batch: int
    round_trip_ms: float | None = None
    slowness: float = 1.0


def batches(fleet: Fleet) -> list[int]:
    """Loads at which rates are measured, up to the most sequences of a verifier."""
    most = fleet.verifiers.max_sequences
    return sorted({*[batch for batch in _BATCHES if batch < most], most})


def keys(fleet: Fleet) -> list[CellKey]:
    """All cells that a fleet needs. Over a bad link the drafter's own speed does not matter."""
    links = fleet.links
    found = []
    for batch in batches(fleet):
        found.append(CellKey(batch=batch))
        if fleet.drafters.count:
            good = links.round_trip_ms
            found += [CellKey(batch=batch, round_trip_ms=good, slowness=s) for s in SLOWNESS]
            found.append(CellKey(batch=batch, round_trip_ms=links.bad_round_trip_ms))
    return list(dict.fromkeys(found))


def scenario(fleet: Fleet, key: CellKey) -> Scenario:
    """The engine-level simulator's scenario of a cell."""
    traffic = fleet.traffic
    verifiers = fleet.verifiers
    drafters = fleet.drafters
    length = (traffic.output_tokens[0] + traffic.output_tokens[-1]) / 2
    decode_step_s = costs.load(fleet.costs).forward_s(key.batch, key.batch)
    seconds = max(_REQUESTS / key.batch, _WAVES) * length * decode_step_s
    drafter = {
        "name": "drafter",
        "acceptance": drafters.acceptance,
        "cost": drafters.cost,
        "slowness": key.slowness,
        "round_trip_ms": key.round_trip_ms or 0.0,
    }
    return Scenario.model_validate(
        {
            "seed": fleet.seed,
            "costs": fleet.costs,
            "seconds": min(max(seconds, _LEAST_S), _MOST_S),
            "sequences": [key.batch],
            "prompt_tokens": traffic.prompt_tokens,
            "output_tokens": traffic.output_tokens,
            "client_ms": traffic.client_ms,
            "drafters": [] if key.round_trip_ms is None else [drafter],
            **verifiers.model_dump(),
        }
    )


def measure(job: tuple[Scenario, int]) -> Cell:
    """Run one cell with so many requests under way. The first third of the time does not count."""
    from outrider_bench.simulator.simulation import simulate

    found, load = job
    drafting = bool(found.drafters)
    outcome = simulate(found, load, drafting=drafting)
    sample = outcome.sample
    pairs = zip(sample.ttft, sample.requests, strict=True)
    later = [(t, *request) for t, request in pairs if request[0] - t >= sample.seconds / 3]
    spans = [(last - first, count - 1) for _, first, last, count in later if count > 1]
    token_s = sum(span for span, _ in spans) / sum(count for _, count in spans)
    busy_s = 0.0
    if drafting:
        busy_s = outcome.drafters["drafter"]["busy_seconds"]
    stretch = np.quantile([span / count for span, count in spans], QUANTILES) / token_s
    return Cell(
        tokens_per_s=sample.tokens / sample.seconds,
        step_s=sample.seconds / sample.counters["step_seconds_count"],
        token_s=token_s,
        busy=busy_s / sample.seconds,
        ttft_s=np.quantile([ttft for ttft, *_ in later], QUANTILES).tolist(),
        stretch=stretch.tolist(),
    )


def cells(fleets: Iterable[Fleet], file: Path, *, processes: int | None = None) -> dict[str, Cell]:
    """Measured cells by `cell_id`, of all that these fleets need.

    Those that `file` has, made by the same code, are not measured again. Raises
    ValueError if the file is none of this kind.
    """
    known = _read(file)
    missing: dict[str, tuple[Scenario, int]] = {}
    for fleet in fleets:
        for key in keys(fleet):
            name = cell_id(fleet, key)
            if name not in known:
                missing[name] = (scenario(fleet, key), key.batch)
    if missing:
        workers = min(processes or len(os.sched_getaffinity(0)), len(missing))
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            results = pool.map(measure, missing.values())
            told = track(results, description="measuring rates", total=len(missing), transient=True)
            known.update(zip(missing, told, strict=True))
        _write(file, known)
    return known


def cell_id(fleet: Fleet, key: CellKey) -> str:
    """A name that is the same for the same cell of the same code."""
    table = costs.load(fleet.costs).model_dump_json()
    asked = scenario(fleet, key).model_dump_json(exclude={"config"})
    text = "\n".join((_code_hash(), table, asked))
    return hashlib.sha256(text.encode()).hexdigest()[:24]


@cache
def _code_hash() -> str:
    digest = hashlib.sha256()
    for pattern in _SOURCES:
        for path in sorted(_ROOT.glob(pattern)):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _read(file: Path) -> dict[str, Cell]:
    if not file.exists():
        return {}
    try:
        data = json.loads(file.read_text())
        return {name: Cell.model_validate(cell) for name, cell in data.items()}
    except (ValidationError, ValueError, AttributeError) as error:
        raise ValueError(f"rates: {file} holds no measured rates: {error}") from error


def _write(file: Path, known: dict[str, Cell]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps({name: cell.model_dump() for name, cell in known.items()}))
    os.replace(partial, file)
