"""A row of raw measurements: the answers of one decoding mode to a turn's prompts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Self

from outrider_bench.sample import PER_POSITION, Sample

PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class Turn:
    """A prompt at batch 1, else a group of prompts; all modes answer, one mode after the other."""

    round: int
    kind: str
    batch: int
    temperature: float
    number: int
    """The prompt's place among the prompts of its kind, from 0; 0 for a group."""


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one decoding mode in a turn. Times are in seconds."""

    turn: Turn
    mode: str
    always: bool
    """True if each step had a draft, even where a step without a draft would have been better."""
    tokens: int
    seconds: float
    forwards: int
    """Forwards of the target, each counted once for each sequence in it."""
    drafts: int
    """Drafts that were verified."""
    accepted: tuple[int, ...]
    """For each position in the draft from 0: the number of drafts whose token there was accepted.
    """
    texts: tuple[str, ...]

    @classmethod
    def of(cls, turn: Turn, mode: str, answer: Answer, *, always: bool = False) -> Self:
        """Return the row of a mode's answer."""
        sample, counts = answer.sample, answer.drafts
        accepted = int(counts.get("spec_decode_num_accepted_tokens", 0))
        positions = sum(name.startswith(PER_POSITION) for name in counts)
        return cls(
            turn,
            mode,
            always,
            sample.tokens,
            sample.seconds,
            sample.tokens - accepted if answer.forwards is None else answer.forwards,
            int(counts.get("spec_decode_num_drafts", 0)),
            tuple(int(counts[f"{PER_POSITION}{i}"]) for i in range(positions)),
            answer.texts,
        )

    def line(self) -> str:
        """Return the row as a line of JSON."""
        return json.dumps(asdict(self), ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Answer:
    """A mode's answers in a turn.

    `forwards` is None if it is the number of tokens without the accepted draft tokens.
    """

    sample: Sample
    drafts: Mapping[str, float]
    texts: tuple[str, ...]
    forwards: int | None = None
