"""The costs of serving: the time that a fixed load takes beyond an idle machine's forwards.

The costs come only from that load, never from an experiment. They are a part of the profile.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field

from outrider_bench.experiment.calibration import Served, Step
from outrider_bench.simulator.costs import Costs, NotNegative

SLOWNESS_ON_TARGET_CORES = 2.0
"""Time of drafting on the target's cores over its time elsewhere: the drafter gets half of them."""


class Serving(BaseModel):
    """The costs of serving in a decoding mode at a batch size, beyond the idle machine's costs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    way: str
    batch: int = Field(ge=1)
    sequences: float = Field(gt=0)
    """Sequences of a mean step."""
    slowdown: float = Field(gt=0)
    """Time of a step's forward in this mode, over its time on the idle machine."""
    before_s: float = Field(ge=0)
    """The host's work for a step before its forward, planning included."""
    after_s: float = Field(ge=0)
    """The host's work for a step after its forward."""
    client_s: float = Field(ge=0)
    """Seconds from a client to the verifier; the way back takes as long."""
    round_trip_s: NotNegative = 0.0
    """Seconds from a verdict to the draft for it, drafting excluded."""
    jitter_s: NotNegative = 0.0
    """The largest additional delay of a message in each direction, in seconds."""
    slowness: NotNegative = 1.0
    """Time of drafting over its time on the idle machine."""

    def with_host_times(self, other: Serving) -> Serving:
        """Return these costs, but with the host's working times of another decoding mode."""
        return self.model_copy(update={"before_s": other.before_s, "after_s": other.after_s})


def costs_of_serving(loads: Sequence[Served], costs: Costs) -> list[Serving]:
    """Return the costs of each decoding mode and batch size that was served."""
    plains = {load.batch: load.step for load in loads if load.way == "plain"}
    return [_serving(load, plains[load.batch], costs) for load in loads]


def _serving(load: Served, plain: Step, costs: Costs) -> Serving:
    """Return the costs of a load; `plain` is the step of plain decoding at the same batch size."""
    step = load.step
    found = Serving(
        way=load.way,
        batch=load.batch,
        sequences=step.sequences,
        slowdown=step.forward_s / expected_s(step, costs),
        # No plain step waits for drafts, so its whole wait is planning. The verifier reads messages
        # of drafters between the steps.
        before_s=step.before_s + plain.wait_s + step.between_s,
        after_s=step.after_s,
        client_s=load.client_s,
    )
    if load.way == "plain":
        return found
    drafting_s = load.draft_token_s * step.draft_tokens / max(step.drafts, 1e-9)
    idle_s = costs.drafting[load.way].of_token(max(1, round(step.sequences)))
    return found.model_copy(
        update={
            "round_trip_s": load.round_trip_s,
            "jitter_s": max(0.0, step.answer_s - load.round_trip_s - drafting_s),
            "slowness": max(1.0, load.draft_token_s / idle_s) if idle_s else 1.0,
        }
    )


def busy(costs: Costs, one: Serving, many: Serving) -> Costs:
    """Return the cost table of a serving machine, from its costs at a small and a large batch."""
    span = max(many.sequences - one.sequences, 1e-9)

    def slowdown(sequences: int) -> float:
        """Return how many times as long as on the idle machine a forward of this batch takes.

        The factor is interpolated between the two loads.
        """
        share = min(max((sequences - one.sequences) / span, 0.0), 1.0)
        return one.slowdown + share * (many.slowdown - one.slowdown)

    def line(low: float, high: float) -> tuple[float, float]:
        """Return a step's fixed seconds, and its seconds for each sequence; both are at least 0."""
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


def expected_s(step: Step, costs: Costs) -> float:
    """Return the seconds of this step's forward on the idle machine, with its share of prompts."""
    count = max(1, round(step.sequences))
    scale = step.sequences / count
    tokens = max(count, round((step.sequences + step.draft_tokens) / scale))
    prompts_s = step.prompts * costs.prompt_step_s + step.prompt_tokens * costs.prompt_token_s
    return costs.forward_s(count, tokens) + prompts_s
