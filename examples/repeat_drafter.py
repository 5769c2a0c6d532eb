"""A whole family. It finds the text's last tokens earlier in the text, and proposes what followed.

From the directory that holds `examples`:

    outrider drafter --family examples.repeat_drafter:RepeatFamily --verifier 127.0.0.1:50051
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pydantic import Field

from drafter_svc.families.base import Family, FamilySettings, Loaded
from drafter_svc.metrics import DrafterMetrics
from drafter_svc.placement import PlacementPlan
from outrider.drafter.draft_sequence import DraftSequence


class RepeatSettings(FamilySettings):
    """Settings of the family repeat."""

    match_tokens: int = Field(2, ge=1, le=16)
    """Number of the text's last tokens that are looked up earlier in the text."""


class RepeatFamily(Family):
    """Looks only in the request's own text, so it needs no cache."""

    name = "repeat"
    settings = RepeatSettings

    def __init__(self, match_tokens: int) -> None:
        self._count = match_tokens

    @classmethod
    async def load(
        cls, settings: RepeatSettings, place: PlacementPlan, metrics: DrafterMetrics
    ) -> Loaded:
        """Make a new family, with nothing to load, for each connection."""
        return Loaded(lambda model: cls(settings.match_tokens))

    async def propose(
        self, sequences: Sequence[DraftSequence], interrupted: Callable[[], bool]
    ) -> None:
        """Extend the chain of each sequence by at most the number of tokens that it wants."""
        for sequence in sequences:
            text = [*sequence.tokens, *sequence.guesses]
            sequence.extend(self._continuation(text, sequence.num_wanted))

    def _continuation(self, text: list[int], length: int) -> list[int]:
        """The tokens, at most `length`, after the last earlier occurrence of the text's end."""
        count = self._count
        for start in range(len(text) - count - 1, -1, -1):
            if text[start : start + count] == text[-count:]:
                return text[start + count : start + count + length]
        return []
