"""DSI's table of model pairs, by the rules of the authors' own simulation.

Their simulation waits in place of forwards. Drafting restarts after each rejection, and each start
first asks the target about an empty draft. In SI the drafter waits for that verification, as for
every other one; in DSI further target servers verify while it drafts. The target's own token at a
rejection is not counted. Source: the first published version of the simulation, in
dsi/online/run at commit 91ab8b9 of the authors' repository. Their issue 37 says that the paper's
speeds lack that token.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import ceil

from pydantic import BaseModel, ConfigDict, Field

from outrider_bench.experiment.speculation import dsi_rate, si_rate

LOOKAHEADS = (1, 5, 10)
"""Draft tokens of a block; SI and DSI each take the best for them."""
TARGET_SERVERS = 7
_TOKENS = 50
# No more guesses in a row are right.
_LONGEST_RUN = 20


class ModelPair(BaseModel):
    """A row of the table: latencies of a token in ms, and the published speed of DSI over SI."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    target: str
    drafter: str
    dataset: str
    target_ms: float = Field(gt=0)
    drafter_ms: float = Field(gt=0)
    acceptance: float = Field(gt=0, lt=1)
    dsi_over_si: float = Field(gt=0)


@dataclass(frozen=True, slots=True)
class PairPrediction:
    """DSI over SI: published, by the rules of the authors' simulation, and by theory."""

    name: str
    published: float
    simulated: float
    theory: float

    @property
    def error(self) -> float:
        """The simulated ratio over the published one, less 1."""
        return self.simulated / self.published - 1.0


def prediction_of(pair: ModelPair) -> PairPrediction:
    """The ratios of a pair, each with the best lookahead for either."""
    v, c, a = pair.target_ms, pair.drafter_ms, pair.acceptance
    permitted = [k for k in LOOKAHEADS if ceil(v / (k * c)) <= TARGET_SERVERS]
    si = min(expected_time(v, c, a, k, at_once=False) for k in LOOKAHEADS)
    dsi = min(expected_time(v, c, a, k, at_once=True) for k in permitted)
    theory = max(map(partial(dsi_rate, v, c, a), permitted)) / max(
        map(partial(si_rate, v, c, a), LOOKAHEADS)
    )
    name = f"{pair.target} / {pair.drafter}, {pair.dataset}"
    return PairPrediction(name, pair.dsi_over_si, si / dsi, theory)


def expected_time(v: float, c: float, a: float, k: int, *, at_once: bool) -> float:
    """Mean time for 50 tokens by DSI (`at_once`) or SI, in the unit of v and c.

    v is the time of a target forward, c that of a draft token, a the acceptance and k the number of
    draft tokens of a block. A start after which n guesses are right commits n tokens. As in the
    authors' simulation, the start that makes more than 50 ends with its first verification.
    """
    chances = [(1.0 - a) * a**n for n in range(_LONGEST_RUN)] + [a**_LONGEST_RUN]
    starts = [_start_time(v, c, n, k, at_once=at_once) for n in range(_LONGEST_RUN + 1)]
    rest = [0.0] * (_TOKENS + 1)
    for total in reversed(range(_TOKENS + 1)):
        # A start without a right guess commits nothing.
        seconds = chances[0] * starts[0]
        for n in range(1, _LONGEST_RUN + 1):
            after = total + n
            seconds += chances[n] * (v if after > _TOKENS else starts[n] + rest[after])
        rest[total] = seconds / (1.0 - chances[0])
    return rest[0]


def _start_time(v: float, c: float, n: int, k: int, *, at_once: bool) -> float:
    """Time from a start of drafting to the rejection of the block behind n right guesses."""
    blocks = n // k + 1
    if at_once:
        return blocks * k * c + v
    return v + blocks * (k * c + v)
