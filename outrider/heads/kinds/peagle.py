"""P-EAGLE: EAGLE-3's layers, trained to guess all tokens of a round in one forward.

Rows with the embedding of a mask token and a learned feature follow the rows of the text. The
text's last row gives the first guess, and each mask's row gives a further guess.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import Parameter

from outrider.heads.kinds.eagle3 import Eagle3
from outrider.heads.model import HeadProposal, HeadSequence, Picker
from outrider.heads.spec import Head
from outrider.lm.layout import SequenceSlice


class PEagle(Eagle3):
    """A head whose guesses do not see each other: all are scored before the first is chosen."""

    def __init__(self, head: Head) -> None:
        super().__init__(head)
        self.mask_hidden = Parameter(torch.empty(1, 1, head.spec.feature_width))

    def capture(self, width: int) -> None:
        """Capture nothing, since a round is one forward already."""

    def guess(self, sequences: Sequence[HeadSequence], count: int, pick: Picker) -> HeadProposal:
        """Like HeadModel.guess."""
        states = torch.stack([s.state for s in sequences if s.state is not None]).unsqueeze(1)
        masks, token = count - 1, self.spec.mask_token_id
        if masks and token is not None:
            slices = [
                SequenceSlice([token] * masks, s.kv.num_computed_tokens, s.kv.pages, masks)
                for s in sequences
            ]
            rows = self.rows(slices)
            feature = self.project(self.mask_hidden[0])
            features = feature.expand(len(rows.layout.token_ids), -1)
            masked = self.run(rows.layout.token_ids, features, rows)
            states = torch.cat((states, masked.view(len(sequences), masks, -1)), dim=1)
        scores_BKV = self.state_scores(states)
        for step in range(count):
            pick(scores_BKV[:, step])
        return pick.proposal()
