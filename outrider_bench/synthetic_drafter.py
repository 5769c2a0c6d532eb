"""A drafter that guesses right with a given probability, for machines without a good draft.

outrider drafter --family outrider_bench.synthetic_drafter:SyntheticFamily --verifier HOST:PORT

It repeats the text that the same prompt had before, with errors. So it needs the texts to be
equal, as greedy ones are, and offers nothing for a prompt that it sees for the first time. At an
acceptance of 0 it knows no texts, and every guess is wrong.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from random import Random
from typing import Annotated

from pydantic import Field

from drafter_svc.families.base import Family, FamilySettings, Loaded
from drafter_svc.metrics import Metrics
from drafter_svc.placement import PlacementPlan
from outrider.drafter.draft_sequence import DraftSequence

# The bundled target ends a text with this token, which no measured text has in its middle.
_WRONG = 0


class SyntheticSettings(FamilySettings):
    """Guess right with a given probability, by repeating the text that a prompt had before."""

    acceptance: list[Annotated[float, Field(ge=0, le=1)]] = Field([0.8], min_length=1)
    """Probability that a guess is right if all before it are: one number, or one for each position
    behind the committed tokens that the drafter knows when it guesses; the last number holds for
    all further ones. So guesses that run ahead of the verifier have those of far positions."""

    token_ms: float = Field(0.0, ge=0, le=10_000)
    """Time that drafting a token takes, of all sequences together, as a draft model's forward."""

    seed: int = 0
    """Seed of the errors. Equal texts have equal errors."""


class SyntheticFamily(Family):
    """Repeats known texts with errors. All connections of a process share the texts."""

    name = "synthetic"
    settings = SyntheticSettings

    def __init__(self, settings: SyntheticSettings, texts: list[list[int]]) -> None:
        self._settings = settings
        self._texts = texts
        # By sequence, the known text that begins with its tokens; empty if there is none.
        self._known: dict[int, list[int]] = {}
        self._seeds: dict[int, int] = {}

    @classmethod
    async def load(
        cls, settings: SyntheticSettings, place: PlacementPlan, metrics: Metrics
    ) -> Loaded:
        """Begin without any text."""
        texts: list[list[int]] = []
        return Loaded(lambda info: cls(settings, texts))

    def opened(self, sequence: DraftSequence) -> None:
        """Look for the text that begins with this prompt."""
        count = len(sequence.tokens)
        found = (text for text in self._texts if text[:count] == sequence.tokens)
        self._known[sequence.id] = next(found, [])
        prompt = sequence.tokens[: sequence.opened.prompt_length or count]
        self._seeds[sequence.id] = hash((self._settings.seed, *prompt))

    def closed(self, sequence: DraftSequence) -> None:
        """Remember the sequence's text if it is new, or longer than the text known before."""
        known = self._known.pop(sequence.id, [])
        self._seeds.pop(sequence.id, None)
        tokens = sequence.tokens
        if known[: len(tokens)] == tokens:
            return
        if known and tokens[: len(known)] == known:
            self._texts.remove(known)
        self._texts.insert(0, list(tokens))

    async def propose(
        self, sequences: Sequence[DraftSequence], interrupted: Callable[[], bool]
    ) -> None:
        """Extend the chain of each sequence by the wanted tokens, as far as its text is known."""
        runs = [self._run(sequence) for sequence in sequences]
        if self._settings.token_ms:
            await asyncio.sleep(self._settings.token_ms / 1000 * max(map(len, runs), default=0))
        for sequence, run in zip(sequences, runs, strict=True):
            sequence.extend(run)

    def _run(self, sequence: DraftSequence) -> list[int]:
        rates = self._settings.acceptance
        depth = len(sequence.guesses)
        begin = len(sequence.tokens)
        if not any(rates):
            return [_WRONG] * sequence.num_wanted
        text = self._known.get(sequence.id, [])
        found: list[int] = []
        for place in range(depth, depth + sequence.num_wanted):
            if begin + place >= len(text):
                break
            true = text[begin + place]
            # A draw belongs to a position of a text, so that it is the same in every repetition.
            draw = Random(f"{self._seeds[sequence.id]} {begin + place}").random()
            right = draw < rates[min(place, len(rates) - 1)]
            found.append(true if right else _WRONG if true != _WRONG else _WRONG + 1)
        return found
