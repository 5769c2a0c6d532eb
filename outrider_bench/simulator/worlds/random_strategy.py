"""A strategy that draws right and wrong guesses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import numpy as np

from outrider.drafter.draft_sequence import DraftSequence
from outrider.drafter.strategy import Strategy
from outrider.protocol.draft_messages import SparseDistribution
from outrider.protocol.messages import DraftDistribution
from outrider_bench.simulator.worlds.checked_verifier import CheckedVerifier
from outrider_bench.simulator.worlds.plan import DrafterPlan
from outrider_bench.simulator.worlds.target import VOCAB


class RandomStrategy(Strategy):
    """Has the target's text, and guesses right as often as its plan says."""

    def __init__(self, plan: DrafterPlan, draw: Random, verifier: CheckedVerifier) -> None:
        self.name = plan.family
        self._plan = plan
        self._draw = draw
        self._verifier = verifier

    async def propose(
        self, sequences: Sequence[DraftSequence], interrupted: Callable[[], bool]
    ) -> None:
        """Offer a run of guesses and a branch, or nothing; sometimes raise ValueError."""
        for sequence in sequences:
            if self._draw.random() < self._plan.fails:
                raise ValueError("the plan has this strategy fail")
            if self._draw.random() >= self._plan.silent:
                self._offer(sequence)

    def _offer(self, sequence: DraftSequence) -> None:
        draw = self._draw
        prompt_length = sequence.opened.prompt_length
        text = self._verifier.text_of(sequence.id, prompt_length, sequence.tokens)
        place = len(sequence.tokens) + len(sequence.guesses)
        run = self._run(text[place:], sequence.num_wanted)
        if run:
            confidences = [0.5] * len(run) if draw.random() < 0.3 else []
            sequence.extend(run, self._distributions(sequence, run), confidences)
        if sequence.branch_room > 0 and draw.random() < self._plan.branches:
            at = draw.choice([0, draw.randrange(len(sequence.guesses))])
            sequence.branch(at, self._run(text[len(sequence.tokens) + at :], draw.randint(1, 4)))

    def _run(self, text: list[int], count: int) -> list[int]:
        draw = self._draw
        right = self._plan.right
        known = [
            token if draw.random() < right else draw.randrange(VOCAB) for token in text[:count]
        ]
        return [*known, *draw.choices(range(VOCAB), k=count - len(known))]

    def _distributions(self, sequence: DraftSequence, run: list[int]) -> list[SparseDistribution]:
        if sequence.opened.distribution is not DraftDistribution.SPARSE:
            return []
        found = []
        for token in run:
            other = (token + self._draw.randrange(1, VOCAB)) % VOCAB
            found.append(SparseDistribution(np.array([token, other]), np.array([0.75, 0.25])))
        return found
