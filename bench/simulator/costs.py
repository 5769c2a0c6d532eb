"""Cost tables: seconds of forwards, of the host's work and of drafting, measured on a machine or assumed."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

DIRECTORY = Path(__file__).parent / "costs"


NotNegative = Annotated[float, Field(ge=0)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Forward(_Table):
    """A measured forward of `sequences` sequences with `tokens` tokens each."""

    sequences: int = Field(ge=1)
    tokens: int = Field(ge=1)
    seconds: float = Field(gt=0)


class DraftingCost(_Table):
    """Seconds of drafting: `round_s` for each round, and for each token of all sequences together by how many those are."""

    round_s: NotNegative
    token_s: dict[int, float]
    run_token_s: dict[int, float] = Field(default_factory=dict)
    """The same where one call guesses a whole run, as drafters do that must not run ahead; empty is no different."""
    prompt_token_s: NotNegative = 0.0
    sequence_s: NotNegative = 0.0
    """Of a lookup, for each sequence."""
    branches_s: NotNegative = 0.0
    """Of looking up a sequence's branches."""
    message_s: NotNegative = 0.0
    """Seconds that forwards on the same machine lose to each message of the drafter."""

    def of_token(self, sequences: int) -> float:
        """Seconds for one token of each of so many sequences."""
        return _between(self.token_s, sequences)

    def of_run_token(self, sequences: int) -> float:
        """The same where one call guesses a whole run."""
        return _between(self.run_token_s or self.token_s, sequences)


class LinkCost(_Table):
    """The way between drafter and verifier, as a drafter's settings of the same names."""

    round_trip_ms: NotNegative
    jitter_ms: NotNegative = 0.0
    mbit_s: NotNegative = 0.0


class Costs(_Table):
    """A cost table. `source` says where the figures come from."""

    source: str
    measured: bool
    """Whether the figures were measured on such a machine, not derived from published ones or assumed."""
    links: dict[str, LinkCost] = Field(default_factory=dict)
    """Ways from a drafter to the verifier that such machines have, by name."""
    forwards: list[Forward] = Field(min_length=1)
    prompt_step_s: NotNegative
    """Seconds that a step with prompts adds, whatever their length."""
    prompt_token_s: NotNegative
    """Seconds that each prompt token adds."""
    host_step_s: NotNegative
    """The host's work for a step behind its forward, and for each sequence in it."""
    host_sequence_s: NotNegative
    plan_step_s: NotNegative = 0.0
    """The host's work for a step before its forward, and for each sequence in it."""
    plan_sequence_s: NotNegative = 0.0
    drafting: dict[str, DraftingCost] = Field(default_factory=dict)
    """By the name that a drafter's `cost` gives."""

    _grid: dict[int, dict[int, float]] = PrivateAttr(default_factory=dict)
    _known: dict[tuple[int, int], float] = PrivateAttr(default_factory=dict)

    def forward_s(self, sequences: int, tokens: int, prompt_tokens: int = 0) -> float:
        """Seconds of a forward of `sequences` sequences with `tokens` tokens in all, and of prompts besides."""
        key = (sequences, tokens)
        seconds = self._known.get(key)
        if seconds is None:
            seconds = self._known[key] = self._interpolate(sequences, tokens) if sequences else 0.0
        if prompt_tokens:
            if not sequences:
                seconds = self._interpolate(1, 1)
            seconds += self.prompt_step_s + prompt_tokens * self.prompt_token_s
        return seconds

    def slower(self, times: float) -> Costs:
        """The table where forwards and the host's work take so many times as long."""
        # Made anew, since a copy would keep what was interpolated.
        names = (
            "prompt_step_s",
            "prompt_token_s",
            "host_step_s",
            "host_sequence_s",
            "plan_step_s",
            "plan_sequence_s",
        )
        forwards = [
            forward.model_copy(update={"seconds": times * forward.seconds})
            for forward in self.forwards
        ]
        longer = {name: times * getattr(self, name) for name in names}
        return Costs.model_validate(
            {**self.model_dump(), **longer, "forwards": [each.model_dump() for each in forwards]}
        )

    def _interpolate(self, sequences: int, tokens: int) -> float:
        if not self._grid:
            for point in self.forwards:
                self._grid.setdefault(point.sequences, {})[point.tokens] = point.seconds
        each = tokens / sequences
        return _between(
            {count: _between(row, each) for count, row in self._grid.items()}, sequences
        )


def _between(points: Mapping[int, float], x: float) -> float:
    """The value at `x` on the line through the two points about it: flat before the first, going on beyond the last."""
    xs = sorted(points)
    if x <= xs[0] or len(xs) == 1:
        return points[xs[0]]
    i = min(bisect_left(xs, x), len(xs) - 1)
    low, high = xs[i - 1], xs[i]
    slope = max(points[high] - points[low], 0.0) / (high - low)
    return points[low] + slope * (x - low)


@cache
def load(name: str) -> Costs:
    """A table by the name of one that comes with the simulator, or by its path.

    Raises ValueError where there is none or it is none.
    """
    path = DIRECTORY / f"{name}.json"
    if not path.is_file():
        path = Path(name)
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in DIRECTORY.glob("*.json")))
        raise ValueError(f"costs must be {known} or a file, not {name!r}")
    return Costs.model_validate_json(path.read_text())
