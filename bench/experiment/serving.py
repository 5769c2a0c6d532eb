"""Fits what serving costs to the calibration load: what the profile's load shows beside its simulation on the idle machine's costs.

Only that load is looked at, never an experiment. The result is part of the profile.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from bench.experiment.calibration import Served, Step, task_of
from bench.experiment.recording import Recorder
from bench.simulator.costs import Costs, NotNegative
from bench.simulator.scenario import Scenario, Share
from bench.simulator.simulation import Simulation

_ITERATIONS = 5
# Where the fit begins.
_FIRST_MESSAGE_S, _FIRST_SHARE = 0.0001, 0.3


class Serving(BaseModel):
    """What serving costs in one way and at one batch size, beside the forwards of an idle machine."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    way: str
    batch: int = Field(ge=1)
    sequences: float = Field(gt=0)
    """In a mean step."""
    slowdown: float = Field(gt=0)
    """Forwards of plain steps, over those on the idle machine."""
    before_s: float = Field(ge=0)
    """The host's work for a step before its forward, planning included."""
    after_s: float = Field(ge=0)
    """The same behind it."""
    client_s: float = Field(ge=0)
    """From a client to the verifier, and the same back."""
    round_trip_s: NotNegative = 0.0
    """From a verdict to a draft, without the drafting."""
    jitter_s: NotNegative = 0.0
    """By which a message is late at most, in each direction."""
    slowness: NotNegative = 1.0
    """Drafting, over that on the idle machine."""
    message_s: NotNegative = 0.0
    """That forwards lose to each message of a drafter."""
    interference: Share = 0.0
    """Share of a draft model's time that forwards beside it lose."""


def busy(costs: Costs, one: Serving, many: Serving) -> Costs:
    """The table of a machine that serves, from what it costs at a small and at a large batch."""
    span = max(many.sequences - one.sequences, 1e-9)

    def slowdown(sequences: int) -> float:
        share = min(max((sequences - one.sequences) / span, 0.0), 1.0)
        return one.slowdown + share * (many.slowdown - one.slowdown)

    def line(low: float, high: float) -> tuple[float, float]:
        each = max(0.0, (high - low) / span)
        return max(0.0, low - each * one.sequences), each

    plan, after = line(one.before_s, many.before_s), line(one.after_s, many.after_s)
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
    """The table where forwards lose so much to each message of a drafter."""
    drafting = {
        name: {**cost.model_dump(), "message_s": message_s} for name, cost in costs.drafting.items()
    }
    return Costs.model_validate({**costs.model_dump(), "drafting": drafting})


@dataclass(frozen=True, slots=True)
class _Simulated:
    """Means of a step of a simulated load."""

    lost_s: float
    """Of the forward, to drafters."""
    draft_token_s: float
    first_token_s: float
    planning_s: float
    """By this machine's own clock."""


def fit(served: list[Served], costs: Costs, target: Path, draft: Path, dtype: str) -> list[Serving]:
    """What serving costs, for each way and batch size that was served."""
    recorder = Recorder(target, dtype, {"model": draft})
    fitter = _Fitter(costs, target, recorder)
    batches = sorted({each.batch for each in served})
    by_key = {(each.way, each.batch): each for each in served}
    plain = {batch: fitter.plain(by_key["plain", batch]) for batch in batches}
    found = list(plain.values())
    ngram: dict[int, Serving] = {}
    for way in ("ngram", "model"):
        for batch in batches:
            fitted = fitter.drafted(
                by_key[way, batch], plain[batch], [plain[i] for i in batches], ngram.get(batch)
            )
            ngram.setdefault(batch, fitted)
            found.append(fitted)
    return found


class _Fitter:
    def __init__(self, costs: Costs, target: Path, recorder: Recorder) -> None:
        self._costs = costs
        self._target = target
        self._recorder = recorder

    def plain(self, served: Served) -> Serving:
        step = served.step
        return Serving(
            way="plain",
            batch=served.batch,
            sequences=step.sequences,
            slowdown=step.forward_s / expected_s(step, self._costs),
            # No step waits for drafts, so all of the wait is planning; and what lies between steps comes before one.
            before_s=step.before_s + step.wait_s + step.between_s,
            after_s=step.after_s,
            client_s=served.client_s,
        )

    def drafted(
        self, served: Served, plain: Serving, plains: list[Serving], ngram: Serving | None
    ) -> Serving:
        """The way is the n-gram drafters' (`ngram`, None for themselves), whose answers wait for nothing but it; and so is what
        forwards lose to a message. A draft model's answers also wait for its forwards, which are simulated.
        """
        step = served.step
        fitted = plain.model_copy(
            update={
                "way": served.way,
                "sequences": step.sequences,
                "after_s": step.after_s,
                "round_trip_s": served.round_trip_s,
                "jitter_s": max(
                    0.0,
                    step.answer_s
                    - served.round_trip_s
                    - served.draft_token_s * _draft_length(step),
                ),
                "message_s": _FIRST_MESSAGE_S,
            }
        )
        if ngram is not None:
            names = ("round_trip_s", "jitter_s", "message_s")
            fitted = fitted.model_copy(
                update={name: getattr(ngram, name) for name in names}
                | {"interference": _FIRST_SHARE}
            )
        lost_s = step.forward_s - plain.slowdown * expected_s(step, self._costs)
        for _ in range(_ITERATIONS):
            fitted = self._nearer(
                fitted, served, plains, lost_s, "message_s" if ngram is None else "interference"
            )
        return fitted

    def _nearer(
        self, fitted: Serving, served: Served, plains: list[Serving], lost_s: float, name: str
    ) -> Serving:
        """A fit whose drafting, and whose loss of forwards to `name`, are nearer to the load's."""
        found = self._simulate(served, plains, fitted)
        slower = served.draft_token_s / found.draft_token_s if found.draft_token_s > 0.0 else 1.0
        more = max(lost_s, 0.0) / found.lost_s if found.lost_s > 0.0 else 1.0
        value = getattr(fitted, name) * min(max(more, 0.25), 4.0)
        return fitted.model_copy(
            update={
                # Drafts get shorter where drafting gets slower, so that less than the whole ratio is right.
                "slowness": fitted.slowness * min(max(slower, 0.25), 4.0) ** 0.5,
                # What drafters said is taken in between the steps.
                "before_s": served.step.before_s + found.planning_s + served.step.between_s,
                "client_s": max(
                    0.0, fitted.client_s + (served.first_token_s - found.first_token_s) / 2
                ),
                name: min(value, 1.0) if name == "interference" else value,
            }
        )

    def _simulate(self, served: Served, plains: list[Serving], fitted: Serving) -> _Simulated:
        task = task_of(self._target, served.batch)
        requests = list(zip(task.prompts, task.lengths, strict=True)) * 2
        lines = [
            r.model_dump_json()
            for r in self._recorder.record([("", prompt, length) for prompt, length in requests])
        ]
        low, high = (
            plain.model_copy(update={"before_s": fitted.before_s, "after_s": fitted.after_s})
            for plain in plains
        )
        busy_costs = with_messages(busy(self._costs, low, high), fitted.message_s)
        with TemporaryDirectory() as directory:
            table, recording = Path(directory, "costs.json"), Path(directory, "requests.jsonl")
            table.write_text(busy_costs.model_dump_json())
            recording.write_text("\n".join(lines))
            scenario = Scenario.model_validate(
                {
                    "costs": str(table),
                    "recording": str(recording),
                    "warm_up": len(task.prompts),
                    "seconds": 3600.0,
                    "sequences": [served.batch],
                    "client_ms": 1000 * fitted.client_s,
                    "prefix_caching": False,
                    "drafters": [drafter_of(served.way, fitted)],
                }
            )
            return _steps_of(Simulation(scenario, served.batch))


def _steps_of(simulation: Simulation) -> _Simulated:
    """Run it, and look at its steps."""
    planner = simulation.verifiers["verifier-1"].engine.planner
    timed = _Timed(planner.plan)
    # Nothing else knows how long this takes.
    planner.plan = timed  # type: ignore[method-assign, assignment]
    outcome = simulation.run()
    verifier = simulation.verifiers["verifier-1"]
    [info] = verifier.engine.drafting.roster.infos()
    # Every step has a plan.
    return _Simulated(
        lost_s=verifier.target.lost_s / timed.count,
        draft_token_s=info.token_s or 0.0,
        first_token_s=median(outcome.sample.ttft),
        planning_s=timed.seconds / timed.count,
    )


class _Timed:
    """Calls a function and adds up how long that takes by the real clock."""

    def __init__(self, work: Callable[..., Any]) -> None:
        self.count = 0
        self.seconds = 0.0
        self._work = work

    def __call__(self, *arguments: Any) -> Any:
        started = time.perf_counter()
        result = self._work(*arguments)
        self.seconds += time.perf_counter() - started
        self.count += 1
        return result


def drafter_of(way: str, serving: Serving) -> dict[str, Any]:
    """The simulated drafter of a way, in a process of its own on the same machine, reached over TCP."""
    return {
        "name": way,
        "family": way,
        "cost": way,
        "drafts_by": "lookup" if way == "ngram" else "model",
        "slowness": serving.slowness,
        "interference": serving.interference,
        "round_trip_ms": 1000 * serving.round_trip_s,
        "jitter_ms": 1000 * serving.jitter_s,
    }


def expected_s(step: Step, costs: Costs) -> float:
    """Seconds of such a step's forward on the idle machine; prompts are spread over all steps."""
    count = max(1, round(step.sequences))
    scale = step.sequences / count
    tokens = max(count, round((step.sequences + step.draft_tokens) / scale))
    prompts_s = step.prompts * costs.prompt_step_s + step.prompt_tokens * costs.prompt_token_s
    return costs.forward_s(count, tokens) + prompts_s


def _draft_length(step: Step) -> float:
    return step.draft_tokens / max(step.drafts, 1e-9)
