"""PEARL's speeds from the mean length of its runs, by theory. The window is inferred.

The authors publish the speed over plain decoding and the mean number of tokens from one rejection
to the next, but not the window. It is one number for a pair, so it is inferred from the speed on
one dataset, and the speeds on the others are predicted with it.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from outrider_bench.experiment.speculation import pearl_tokens

_WINDOWS = range(1, 33)


class Run(BaseModel):
    """The published figures on one dataset."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dataset: str
    tokens: float = Field(gt=1)
    """From one rejection to the next, the target's own token included."""
    times_plain: float = Field(gt=0)


class Windowed(BaseModel):
    """A pair; the first of its runs sets the window."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    target: str
    drafter: str
    runs: list[Run] = Field(min_length=2)


@dataclass(frozen=True, slots=True)
class WindowPrediction:
    """The speed over plain decoding on one dataset: published, and predicted."""

    name: str
    window: int
    sets_window: bool
    """Whether the window was inferred from this very speed."""
    published: float
    predicted: float

    @property
    def error(self) -> float:
        """The predicted speed over the published one, less 1."""
        return self.predicted / self.published - 1.0


def windows_of(pair: Windowed) -> list[WindowPrediction]:
    """The speeds on all datasets, with the window that fits the first one best."""
    first = pair.runs[0]
    window = min(_WINDOWS, key=lambda k: abs(_speed(first, k) - first.times_plain))
    return [
        WindowPrediction(
            f"{pair.target} / {pair.drafter}, {run.dataset}",
            window,
            run is first,
            run.times_plain,
            _speed(run, window),
        )
        for run in pair.runs
    ]


def _speed(run: Run, window: int) -> float:
    # If each guess is right with probability a, a run has 1 / (1 - a) tokens in the mean.
    return pearl_tokens(1.0 - 1.0 / run.tokens, window)
