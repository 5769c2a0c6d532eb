"""A drafter whose every guess is wrong, to measure what useless drafters cost.

outrider drafter --family outrider_bench.wrong_drafter:WrongFamily --verifier HOST:PORT
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from drafter_svc.families.base import Family, FamilySettings, Loaded
from drafter_svc.metrics import Metrics
from drafter_svc.placement import PlacementPlan
from outrider.drafter.draft_sequence import DraftSequence

# The bundled target ends a text with this token, which no measured text has in its middle.
_WRONG = 0


class WrongFamily(Family):
    """Repeats one token."""

    name = "wrong"
    settings = FamilySettings

    @classmethod
    async def load(cls, settings: FamilySettings, place: PlacementPlan, metrics: Metrics) -> Loaded:
        """Make a family; there is nothing to load."""
        return Loaded(lambda model: cls())

    async def propose(
        self, sequences: Sequence[DraftSequence], interrupted: Callable[[], bool]
    ) -> None:
        """Extend the chain of each sequence by the wanted tokens."""
        for sequence in sequences:
            sequence.extend([_WRONG] * sequence.num_wanted)
