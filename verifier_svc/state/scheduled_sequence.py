"""One sequence's part of a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from verifier_svc.state.sequence import Assignment, Sequence
from verifier_svc.state.trie import Path

NO_PATH = Path([], [])

_NOTHING = range(0)


@dataclass(slots=True)
class ScheduledSequence:
    """One sequence's part of a batch: committed tokens that the model has not seen, then a draft behind the last of them.

    `start` is the position of the first token. `samples` is False for a chunk of a prompt that is not its last, since no token is
    drawn behind it. `planned_draft_tokens` is what the plan allows the draft.
    `scored` are the positions of the prompt's tokens whose log probabilities this part yields; their logits rows
    come before the rows to draw from. `mask` is what the grammar allows, as in `outrider.sampling.logits.Context`.
    """

    sequence: Sequence
    start: int
    token_ids: list[int]
    path: Path
    assignment: Assignment | None
    samples: bool
    planned_draft_tokens: int = 0
    scored: range = _NOTHING
    mask: npt.NDArray[np.int32] | None = None

    @property
    def logit_count(self) -> int:
        return len(self.scored) + (len(self.path.token_ids) + 1 if self.samples else 0)
