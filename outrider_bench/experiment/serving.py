"""Fits the costs of serving, so that a simulation of the calibration load agrees with the real one.

The simulation begins with the costs of an idle machine. Only that load counts, never an experiment.
The result is part of the profile.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from outrider_bench.experiment.calibration import Served, Step, load_of
from outrider_bench.experiment.recording import Recorder
from outrider_bench.simulator.costs import Costs, NotNegative
from outrider_bench.simulator.scenario import Scenario, Share
from outrider_bench.simulator.simulation import Simulation
from outrider_bench.simulator.verifier import VerifierActor

_ITERATIONS = 5
SLOWNESS_ON_TARGET_CORES = 2.0
"""Time of drafting on the target's cores over that alone: the system shares a core in halves."""
# Where the fit begins.
_FIRST_MESSAGE_S, _FIRST_SHARE = 0.0001, 0.3


class Serving(BaseModel):
    """The costs of serving in one way at one batch size, on top of an idle machine's forwards."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    way: str
    batch: int = Field(ge=1)
    sequences: float = Field(gt=0)
    """Sequences of a mean step."""
    slowdown: float = Field(gt=0)
    """Time of a plain step's forward over that on the idle machine."""
    before_s: float = Field(ge=0)
    """The host's work for a step before its forward, planning included."""
    after_s: float = Field(ge=0)
    """The host's work for a step after its forward."""
    client_s: float = Field(ge=0)
    """From a client to the verifier, and the same back."""
    round_trip_s: NotNegative = 0.0
    """From a verdict to a draft, without the drafting."""
    jitter_s: NotNegative = 0.0
    """The most that a message is late, in each direction."""
    slowness: NotNegative = 1.0
    """Time of drafting over that on the idle machine."""
    message_s: NotNegative = 0.0
    """Time that forwards lose to each message of a drafter."""
    interference: Share = 0.0
    """Share of a draft model's time that forwards beside it lose."""

    def with_host_times(self, other: Serving) -> Serving:
        """These costs with the host's work of another way."""
        return self.model_copy(update={"before_s": other.before_s, "after_s": other.after_s})


def busy(costs: Costs, one: Serving, many: Serving) -> Costs:
    """The table of a machine that serves, from its costs at a small and at a large batch."""
    span = max(many.sequences - one.sequences, 1e-9)

    def slowdown(sequences: int) -> float:
        """The factor of a forward, interpolated between the two measured loads."""
        share = min(max((sequences - one.sequences) / span, 0.0), 1.0)
        return one.slowdown + share * (many.slowdown - one.slowdown)

    def line(low: float, high: float) -> tuple[float, float]:
        """Seconds of a step and of each further sequence, neither negative."""
        each = max(0.0, (high - low) / span)
        return max(0.0, low - each * one.sequences), each

    plan = line(one.before_s, many.before_s)
    after = line(one.after_s, many.after_s)
    return Costs.model_validate(
        {
            **costs.model_dump(),
            "forwards": [
                {**f.model_dump(), "seconds": f.seconds * slowdown(f.sequences)}
                for f in costs.forwards
            ],
            "prompt_step_s": costs.prompt_step_s * one.slowdown,
            "prompt_token_s": costs.prompt_token_s * one.slowdown,
            "plan_step_s": plan[0],
            "plan_sequence_s": plan[1],
            "host_step_s": after[0],
            "host_sequence_s": after[1],
        }
    )


def with_messages(costs: Costs, message_s: float) -> Costs:
    """The table with forwards that lose `message_s` more to each message of a drafter."""
    drafting = {
        name: cost.model_copy(update={"message_s": cost.message_s + message_s})
        for name, cost in costs.drafting.items()
    }
    return costs.model_copy(update={"drafting": drafting})


@dataclass(frozen=True, slots=True)
class _Simulated:
    """Means of a step of a simulated load."""

    lost_s: float
    """Time that the forward loses to drafters."""
    draft_token_s: float
    first_token_s: float
    planning_s: float
    """By the real clock."""


def fit(served: list[Served], costs: Costs, target: Path, draft: Path, dtype: str) -> list[Serving]:
    """The costs of serving, for each way and batch size that was served."""
    fitter = _Fitter(costs, target, Recorder(target, dtype, {"model": draft}))
    batches = sorted({each.batch for each in served})
    by_key = {(each.way, each.batch): each for each in served}
    plains = [fitter.plain(by_key["plain", batch]) for batch in batches]
    found = list(plains)
    ngram: dict[int, Serving] = {}
    for way in ("ngram", "model"):
        for batch, plain in zip(batches, plains, strict=True):
            fitted = fitter.drafted(by_key[way, batch], plain, plains, ngram.get(batch))
            ngram.setdefault(batch, fitted)
            found.append(fitted)
    return found


class _Fitter:
    def __init__(self, costs: Costs, target: Path, recorder: Recorder) -> None:
        self._costs = costs
        self._target = target
        self._recorder = recorder

    def plain(self, served: Served) -> Serving:
        """The costs of serving without drafters, from a measured load."""
        step = served.step
        return Serving(
            way="plain",
            batch=served.batch,
            sequences=step.sequences,
            slowdown=step.forward_s / expected_s(step, self._costs),
            # No step waits for drafts, so the whole wait is planning.
            before_s=step.before_s + step.wait_s + step.between_s,
            after_s=step.after_s,
            client_s=served.client_s,
        )

    def drafted(
        self, served: Served, plain: Serving, plains: list[Serving], ngram: Serving | None
    ) -> Serving:
        """The costs with drafters. `ngram` has those of n-gram drafters, or is None for them.

        The answers of n-gram drafters wait for the network alone, so they show its round trip and
        jitter, and the time that forwards lose to a message. A draft model's answers also
        wait for its forwards, which are simulated.
        """
        step = served.step
        drafting_s = served.draft_token_s * step.draft_tokens / max(step.drafts, 1e-9)
        network = {
            "round_trip_s": served.round_trip_s,
            "jitter_s": max(0.0, step.answer_s - served.round_trip_s - drafting_s),
            "message_s": _FIRST_MESSAGE_S,
        }
        fitted_name = "message_s"
        if ngram is not None:
            network = {name: getattr(ngram, name) for name in network}
            network["interference"] = _FIRST_SHARE
            fitted_name = "interference"
        own = {"way": served.way, "sequences": step.sequences, "after_s": step.after_s}
        fitted = plain.model_copy(update=own | network)
        lost_s = step.forward_s - plain.slowdown * expected_s(step, self._costs)
        for _ in range(_ITERATIONS):
            fitted = self._nearer(fitted, served, plains, lost_s, fitted_name)
        return fitted

    def _nearer(
        self, fitted: Serving, served: Served, plains: list[Serving], lost_s: float, name: str
    ) -> Serving:
        """A fit whose drafting, and whose loss of forwards by `name`, are nearer to the load's."""
        found = self._simulate(served, plains, fitted)
        slower = _bounded_ratio(served.draft_token_s, found.draft_token_s)
        value = getattr(fitted, name) * _bounded_ratio(max(lost_s, 0.0), found.lost_s)
        client_s = fitted.client_s + (served.first_token_s - found.first_token_s) / 2
        return fitted.model_copy(
            update={
                # Slower drafting makes drafts shorter, so the whole ratio would be too much.
                "slowness": fitted.slowness * slower**0.5,
                # The verifier reads messages of drafters between the steps.
                "before_s": served.step.before_s + found.planning_s + served.step.between_s,
                "client_s": max(0.0, client_s),
                name: min(value, 1.0) if name == "interference" else value,
            }
        )

    def _simulate(self, served: Served, plains: list[Serving], fitted: Serving) -> _Simulated:
        load = load_of(self._target, served.batch)
        low, high = (plain.with_host_times(fitted) for plain in plains)
        scenario = Scenario.model_validate(
            {
                "costs": with_messages(busy(self._costs, low, high), fitted.message_s),
                "recording": self._recorder.record(load * 2),
                "warm_up": len(load),
                "seconds": 3600.0,
                "sequences": [served.batch],
                "client_ms": 1000 * fitted.client_s,
                "prefix_caching": False,
                "drafters": [drafter_of(served.way, fitted)],
            }
        )
        simulation = Simulation(scenario, served.batch, verifier=_TimedVerifier)
        return _steps_of(simulation)


def _bounded_ratio(wanted: float, found: float) -> float:
    """`wanted` / `found`, between a quarter and 4; 1 if nothing was found."""
    if found > 0.0:
        return min(max(wanted / found, 0.25), 4.0)
    return 1.0


def _steps_of(simulation: Simulation) -> _Simulated:
    """Run the simulation and return the means of its steps."""
    outcome = simulation.run()
    verifier = simulation.verifiers["verifier-1"]
    assert isinstance(verifier, _TimedVerifier)  # the simulation was made with it
    [info] = verifier.engine.drafting.roster.infos()
    return _Simulated(
        lost_s=verifier.target.lost_s / verifier.step_count,
        draft_token_s=info.token_s or 0.0,
        first_token_s=median(outcome.sample.ttft),
        planning_s=verifier.planning_s / verifier.planned_count,
    )


class _TimedVerifier(VerifierActor):
    """Counts steps, and times their planning by the real clock.

    It makes plans of its own beside the engine's: planning changes nothing, and methods of a
    compiled engine cannot be replaced.
    """

    step_count = 0
    planned_count = 0
    planning_s = 0.0

    def _advance(self, number: int) -> None:
        engine = self.engine
        last = engine.drafting.plan
        running = engine.scheduler.running.values()
        if running:
            started = time.perf_counter()
            engine.planner.plan(running, last, self.step_count, engine.clock())
            self.planning_s += time.perf_counter() - started
            self.planned_count += 1
        super()._advance(number)
        # Each step has a plan of its own.
        self.step_count += engine.drafting.plan is not last


def drafter_of(way: str, serving: Serving) -> dict[str, Any]:
    """The simulated drafter of a way: a process on the same machine, reached over TCP."""
    return {
        "name": way,
        "family": way,
        "cost": way,
        "drafts_by": "lookup" if way == "ngram" else way,
        "slowness": serving.slowness,
        "interference": serving.interference,
        "round_trip_ms": 1000 * serving.round_trip_s,
        "jitter_ms": 1000 * serving.jitter_s,
    }


def expected_s(step: Step, costs: Costs) -> float:
    """Seconds of such a step's forward on the idle machine, with its share of prompts."""
    count = max(1, round(step.sequences))
    scale = step.sequences / count
    tokens = max(count, round((step.sequences + step.draft_tokens) / scale))
    prompts_s = step.prompts * costs.prompt_step_s + step.prompt_tokens * costs.prompt_token_s
    return costs.forward_s(count, tokens) + prompts_s
