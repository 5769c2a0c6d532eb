"""Cost tables: seconds of forwards, of the host's work and of drafting, measured or assumed."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

DIRECTORY = Path(__file__).parent / "costs"


# The type of a number of sequences or of tokens.
_Number = TypeVar("_Number", int, float)
NotNegative = Annotated[float, Field(ge=0)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Forward(_Table):
    """A measured forward of `sequences` sequences with `tokens` tokens each, on average."""

    sequences: int = Field(ge=1)
    tokens: float = Field(ge=1)
    seconds: float = Field(gt=0)


class DraftingCost(_Table):
    """Seconds of drafting: a fixed time for each round, and a time for each token.

    `token_s` maps a number of sequences to the time for one token of each of them.
    """

    round_s: NotNegative
    token_s: dict[int, float]
    run_token_s: dict[int, float] = Field(default_factory=dict)
    """Like `token_s`, for calls that draft several tokens: a draft model makes them if it must not
    run ahead. Empty if the times are the same."""
    tree_token_s: dict[int, float] = Field(default_factory=dict)
    """Like `token_s`, for a head's drafts that are trees; empty if the times are the same."""
    prompt_token_s: NotNegative = 0.0
    sequence_s: NotNegative = 0.0
    """Seconds of a lookup, or of a head's round, for each sequence."""
    branches_s: NotNegative = 0.0
    """Seconds of the lookup of a sequence's branches."""
    message_s: NotNegative = 0.0
    """Seconds that forwards on the same machine lose to each message of the drafter."""

    def of_token(self, sequences: int) -> float:
        """Return the seconds for one token of each of `sequences` sequences."""
        return _interpolated(self.token_s, sequences)

    def of_run_token(self, sequences: int) -> float:
        """Return the result of `of_token` for calls that draft several tokens."""
        return _interpolated(self.run_token_s or self.token_s, sequences)

    def of_tree_token(self, sequences: int) -> float:
        """Return the result of `of_token` for drafts that are trees of a head."""
        return _interpolated(self.tree_token_s or self.token_s, sequences)


class LinkShape(_Table):
    """How a link delays and slows connections, alike in both directions."""

    round_trip_ms: float = Field(0.0, ge=0, le=10_000)
    """Round trip, half in each direction; for a proxy, the time that it adds."""

    jitter_ms: float = Field(0.0, ge=0, le=10_000)
    """The largest random delay of a message in each direction; delays are uniform from 0. The order
    of bytes is kept."""

    mbit_s: float = Field(0.0, ge=0)
    """Bandwidth in each direction; 0 is no limit."""

    loss: float = Field(0.0, ge=0, lt=1)
    """Share of lost segments. TCP sends a lost segment again: it and all later segments then come
    later by a round trip, but by at least `retransmit_ms`."""

    retransmit_ms: float = Field(200.0, ge=0)
    """Least time until a lost segment is sent again; Linux has at least 200."""


class Costs(_Table):
    """A cost table. `source` names the origin of the figures."""

    source: str
    measured: bool
    """True if the figures were measured on a machine of this kind; False if they were assumed or
    derived from published figures."""
    links: dict[str, LinkShape] = Field(default_factory=dict)
    """Links from a drafter to the verifier on machines of this kind, keyed by name."""
    forwards: list[Forward] = Field(min_length=1)
    prompt_step_s: NotNegative
    """Seconds that a step with prompts adds, independent of the prompts' length."""
    prompt_token_s: NotNegative
    """Seconds that each prompt token adds."""
    host_step_s: NotNegative
    """The host's work after a step's forward. `host_sequence_s` is added for each sequence."""
    host_sequence_s: NotNegative
    plan_step_s: NotNegative = 0.0
    """The host's work before a step's forward. `plan_sequence_s` is added for each sequence."""
    plan_sequence_s: NotNegative = 0.0
    drafted_sequence_s: NotNegative = 0.0
    """Seconds that each sequence with a draft adds to the host's work after a step."""
    drafting: dict[str, DraftingCost] = Field(default_factory=dict)
    """Costs of drafting, keyed by the name in a drafter's `cost` setting."""

    _grid: dict[int, dict[float, float]] = PrivateAttr(default_factory=dict)
    _known: dict[tuple[int, int], float] = PrivateAttr(default_factory=dict)

    @property
    def host_link(self) -> LinkShape:
        """The link between drafter and verifier on one host.

        If the table has none, the link's round trip is 0.4 ms, as long as gRPC takes.
        """
        return self.links.get("drafter", LinkShape.model_validate({"round_trip_ms": 0.4}))

    def forward_s(self, sequences: int, tokens: int, prompt_tokens: int = 0) -> float:
        """Return the seconds of a forward.

        The forward has `tokens` tokens of `sequences` decoding sequences, and `prompt_tokens`
        tokens of prompts.
        """
        key = (sequences, tokens)
        seconds = self._known.get(key)
        if seconds is None:
            seconds = self._interpolate(sequences, tokens) if sequences else 0.0
            self._known[key] = seconds
        if prompt_tokens:
            if not sequences:
                seconds = self._interpolate(1, 1)
            seconds += self.prompt_step_s + prompt_tokens * self.prompt_token_s
        return seconds

    def _interpolate(self, sequences: int, tokens: int) -> float:
        if not self._grid:
            for point in self.forwards:
                self._grid.setdefault(point.sequences, {})[point.tokens] = point.seconds
        each = tokens / sequences
        by_count = {count: _interpolated(row, each) for count, row in self._grid.items()}
        return _interpolated(by_count, sequences)


def _interpolated(points: Mapping[_Number, float], x: float) -> float:
    """Interpolate `points` linearly at `x`.

    Before the first point the value is constant; after the last point the last slope continues.
    """
    xs = sorted(points)
    if x <= xs[0] or len(xs) == 1:
        return points[xs[0]]
    i = min(bisect_left(xs, x), len(xs) - 1)
    low = xs[i - 1]
    high = xs[i]
    slope = max(points[high] - points[low], 0.0) / (high - low)
    return points[low] + slope * (x - low)


def way_of(family: str, threads: int) -> str:
    """Return the name that `drafting` has for a family that computes on `threads` threads."""
    return family if threads == 1 else f"{family}-{threads}"


@cache
def load(name: str) -> Costs:
    """Load a table: one of the simulator's own, given its name, or another, given its path.

    Raises ValueError if there is no such file, or if it is not a cost table.
    """
    return Costs.model_validate_json(path_of(name).read_text())


def path_of(name: str) -> Path:
    """Return the file of a table that comes with the simulator, or the file at the path `name`.

    Raises ValueError if there is no such file.
    """
    path = DIRECTORY / f"{name}.json"
    if not path.is_file():
        path = Path(name)
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in DIRECTORY.glob("*.json")))
        raise ValueError(f"must be {known} or a file, not {name!r}")
    return path
