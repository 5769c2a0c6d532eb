"""A drafter family behind its session, which gets a verifier's messages from a test."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from drafter_svc.families.base import Family
from outrider.drafter.session import DraftSession
from outrider.protocol.draft_messages import Closed, DraftBatch, Opened, StepBatch, Verdict, Window
from outrider.protocol.messages import DraftDistribution, SamplingParams

GREEDY = SamplingParams(temperature=0.0)


def never() -> bool:
    return False


def opened_sequence(
    sequence_id: int,
    tokens: Iterable[int],
    window: Window,
    draft_tokens: int,
    *,
    sampling: SamplingParams = GREEDY,
    distribution: DraftDistribution = DraftDistribution.ONE_HOT,
    **more: Any,
) -> Opened:
    """Return a sequence for which the verifier can use `draft_tokens` draft tokens in each step.

    The sequence is greedy by default.
    """
    text = list(tokens)
    return Opened(sequence_id, text, sampling, distribution, window, draft_tokens, **more)


class Rig:
    """Opens, commits and closes sequences of a family's `session`, and collects its drafts."""

    def __init__(self, family: Family) -> None:
        self.session = DraftSession(family, lambda: 0.0)

    def open(self, opened: Opened) -> None:
        self.session.apply(StepBatch(opened=[opened]))

    def commit(
        self, sequence_id: int, *new: int, window: Window | None = None, tree_tokens: int = 0
    ) -> None:
        """Send a verdict with these tokens; by default the window stays as it is."""
        sequence = self.session.sequences[sequence_id]
        length = len(sequence.tokens) + len(new)
        draft_tokens = sequence.draft_tokens
        verdict = Verdict(
            sequence_id, length, list(new), 0, draft_tokens, window, tree_tokens=tree_tokens
        )
        self.session.apply(StepBatch(verdicts=[verdict]))

    def close(self, sequence_id: int) -> None:
        self.session.apply(StepBatch(closed=[Closed(sequence_id)]))

    async def draft(self, interrupted: Callable[[], bool] = never) -> DraftBatch:
        """Return the messages of one round of drafting."""
        return await self.session.round(interrupted)

    async def drafts(self) -> DraftBatch:
        """Return the messages of all rounds until a round has none."""
        sent = DraftBatch()
        while (batch := await self.draft()).proposals or batch.skips:
            sent.proposals += batch.proposals
            sent.skips += batch.skips
        return sent

    def guesses(self, sequence_id: int) -> list[int]:
        """Return the sequence's proposed tokens that are neither committed nor refuted."""
        return list(self.session.sequences[sequence_id].guesses)

    @property
    def abandoned(self) -> set[int]:
        """The ids of the sequences whose drafting ended because it raised an exception."""
        return {sequence.id for sequence in self.session.sequences.values() if sequence.abandoned}
