"""Measures a profile: forwards, drafting and serving before any experiment."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from outrider_bench.console import progress
from outrider_bench.experiment import machine
from outrider_bench.experiment.profile_record import Conditions, Profile
from outrider_bench.settings import ProfileSettings

_MOST_SEQUENCES = 32
_FORWARDS = "forwards, prompts and drafting"
_SERVING = "serving a fixed load"
_PARTS = {_FORWARDS: 1.0, _SERVING: 2.0}
"""The parts in order, with the approximate minutes that each takes for the bundled pair."""
# The minutes that one of the 24 runs of the fixed load takes.
_RUN = _PARTS[_SERVING] / 24
_HOW = {
    "costs.forwards": "the fastest of up to 400 forwards after 128 tokens, in a process by itself; "
    "no figure exceeds that of a larger forward",
    "costs.prompts": "forwards of prompts of 32 and 256 tokens, the fastest of up to 100",
    "costs.host": "the engine's own time for steps whose forward takes no time, the fastest of 55",
    "costs.drafting": "forwards of the draft model by threads, and the median lookup of n-grams",
    "served": "a fixed closed load through the gateway, three rounds after one that warms up",
    "serving": "the time of the load beyond what `costs` explains; no experiment is used",
}


def measure(settings: ProfileSettings) -> Profile:
    """Measure all parts in turn. Print each part's name; a bar shows progress and time left."""
    with progress() as bar:
        task = bar.add_task("", total=sum(_PARTS.values()))

        def begin(part: str) -> None:
            """Print that a part begins."""
            done = list(_PARTS)[: list(_PARTS).index(part)]
            bar.update(task, description=part, completed=sum(_PARTS[name] for name in done))
            print(part, flush=True)

        return _measure(settings, begin, lambda: bar.advance(task, _RUN))


def _measure(
    settings: ProfileSettings, begin: Callable[[str], None], tell: Callable[[], None]
) -> Profile:
    """Measure all parts; call `begin` before each part, and `tell` after each run of the load."""
    from outrider_bench.experiment import calibration, serving
    from outrider_bench.simulator import measured_costs

    cores = sorted(os.sched_getaffinity(0))
    threads = settings.threads or max(1, len(cores) - 1)
    if threads > len(cores):
        raise ValueError(f"threads must be at most the {len(cores)} cores, not {threads}")
    target = _target(settings)
    draft = Path(settings.draft)
    here = machine.this_machine()
    for warning in machine.warnings():
        print(f"outrider lab profile: {warning}", file=sys.stderr)
    load, spread = os.getloadavg()[0], machine.spread()
    begin(_FORWARDS)
    costs = measured_costs.measure(
        target, draft, threads, settings.dtype, settings.draft_threads, _MOST_SEQUENCES
    )
    begin(_SERVING)
    served = calibration.calibrate(target, draft, settings.dtype, threads, tell)
    return Profile(
        machine=asdict(here),
        fingerprint=here.fingerprint,
        commit=machine.commit(Path(__file__).parents[2]),
        measured_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        target=settings.target + (" grown" if settings.grown else ""),
        draft=settings.draft,
        dtype=settings.dtype,
        threads=threads,
        how=_HOW,
        costs=costs,
        conditions=Conditions(
            load_averages=(load, os.getloadavg()[0]), spread=max(spread, machine.spread())
        ),
        served=served,
        serving=serving.costs_of_serving(served, costs),
    )


def _target(settings: ProfileSettings) -> Path:
    path = Path(settings.target)
    if not path.is_dir():
        raise ValueError(f"target must be a directory of a model, which {path} is not")
    if not settings.grown:
        return path
    from outrider_bench.grown import modest_target

    if settings.dtype not in ("float32", "bfloat16"):
        raise ValueError(
            f"dtype must be float32 or bfloat16 for a grown target, not {settings.dtype}"
        )
    return modest_target(path, settings.dtype)
