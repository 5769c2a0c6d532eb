"""Sequences for the tests of the draft model, and the draft model's guesses for them."""

from __future__ import annotations

from collections.abc import Callable

from outrider.protocol.draft_messages import Opened, Window
from outrider.protocol.messages import DraftDistribution, SamplingParams
from tests.family_rig import GREEDY, Rig, opened_sequence

Make = Callable[..., Rig]
"""Makes a rig of the draft model, with settings of ModelFamily and DraftModel."""
Greedy = Callable[[list[int], int], list[int]]
"""Continues a text greedily, as the model does, by this number of tokens."""


def opened(
    tokens: list[int],
    sequence_id: int = 1,
    *,
    depth: int = 4,
    window: int = 9,
    sampling: SamplingParams = GREEDY,
    distribution: DraftDistribution = DraftDistribution.ONE_HOT,
) -> Opened:
    """Return a sequence with `depth` draft tokens a step and a window of `window` tokens."""
    room = Window(4 * window, window)
    return opened_sequence(
        sequence_id, tokens, room, depth, sampling=sampling, distribution=distribution
    )


async def guesses_of(rig: Rig) -> dict[int, list[int]]:
    """Return each sequence's guesses after drafting has ended.

    The chain of every proposal must agree with them.
    """
    for proposal in (await rig.drafts()).proposals:
        count = len(proposal.token_ids)
        for i, parent in enumerate(proposal.parents):
            if parent != i:
                count = i
                break
        assert proposal.token_ids[:count] == rig.guesses(proposal.sequence_id)[:count]
    return {sequence_id: rig.guesses(sequence_id) for sequence_id in rig.session.sequences}
