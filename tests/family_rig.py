"""A drafter family behind its session, told what a verifier would tell it."""

from __future__ import annotations

from collections.abc import Callable

from drafter_svc.families.base import Family
from outrider.drafter.session import DraftSession
from outrider.messages import Closed, DraftBatch, Opened, StepBatch, Verdict, Window


def never() -> bool:
    return False


class Rig:
    """`session` has the sequences, whose `guesses` are what was proposed."""

    def __init__(self, family: Family) -> None:
        self.session = DraftSession(family, lambda: 0.0)

    def open(self, opened: Opened) -> None:
        self.session.apply(StepBatch(opened=[opened]))

    def commit(self, sequence_id: int, *new: int, window: Window | None = None) -> None:
        """A verdict of these tokens; as many draft tokens are wanted as before."""
        sequence = self.session.sequences[sequence_id]
        length = len(sequence.tokens) + len(new)
        self.session.apply(
            StepBatch(
                verdicts=[Verdict(sequence_id, length, list(new), 0, sequence.draft_tokens, window)]
            )
        )

    def close(self, sequence_id: int) -> None:
        self.session.apply(StepBatch(closed=[Closed(sequence_id)]))

    async def draft(self, interrupted: Callable[[], bool] = never) -> DraftBatch:
        """What is said in one round."""
        return await self.session.round(interrupted)

    async def drafts(self) -> DraftBatch:
        """All that is said until the drafter falls silent."""
        said = DraftBatch()
        while (batch := await self.draft()).proposals or batch.skips:
            said.proposals += batch.proposals
            said.skips += batch.skips
        return said

    def guesses(self, sequence_id: int) -> list[int]:
        return list(self.session.sequences[sequence_id].guesses)

    @property
    def abandoned(self) -> set[int]:
        """The sequences that were given up because their part of the work raised."""
        return {sequence.id for sequence in self.session.sequences.values() if sequence.abandoned}
