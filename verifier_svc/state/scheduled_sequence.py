"""One sequence's part of a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from verifier_svc.state.sequence import Assignment, Sequence
from verifier_svc.state.trie import DraftTree

_NOTHING = range(0)


@dataclass(slots=True)
class ScheduledSequence:
    """One sequence's part of a batch: committed tokens that no forward has seen, then a draft."""

    sequence: Sequence
    start: int
    """Position of the first token."""
    token_ids: list[int]
    """The committed tokens."""
    draft: DraftTree
    assignment: Assignment | None
    """The assignment that the draft's main path comes from."""
    samples: bool
    """True if a token is drawn. False for each chunk of a prompt except the last chunk."""
    planned_draft_tokens: int = 0
    """The maximum number of draft tokens that the plan allows."""
    scored: range = _NOTHING
    """Positions of the prompt tokens whose log probabilities this part yields.

    Their logits rows come before the rows to draw from.
    """
    mask: npt.NDArray[np.int32] | None = None
    """Tokens that the grammar allows, as in `outrider.sampling.context.Context`."""
    is_late: bool = False
    """True if this part must be repeated: its masks were not there in time, or it `is_spoilt`."""
    is_spoilt: bool = False
    """True if the draft made logits infinite or NaN; then the whole part is computed anew."""

    @property
    def logit_count(self) -> int:
        """The number of logits rows that this part needs."""
        drawn = len(self.draft.token_ids) + 1 if self.samples else 0
        return len(self.scored) + drawn
