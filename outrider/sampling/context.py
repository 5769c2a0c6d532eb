"""A sequence's tokens and settings, which decide how its logits are adjusted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from outrider.protocol.messages import SamplingParams
from outrider.protocol.token_tree import depths

Mask = npt.NDArray[np.int32]


@dataclass(slots=True)
class Context:
    """The tokens before the rows of one sequence, and the sequence's settings.

    Row i has the logits of the token that follows `tokens` and then the path to row i. Without
    `parents` the path is the first i tokens of `drafted`; otherwise see `protocol.token_tree`.
    `tokens` are committed, and the first `prompt_length` of them are the prompt. `end_ids` end the
    sequence. `mask` is a bitmask of the tokens that the grammar allows, lowest bit first, int32
    [len(drafted) + 1, ceil(V / 32)]; None without a grammar.
    """

    sampling: SamplingParams
    tokens: Sequence[int] = ()
    prompt_length: int = 0
    drafted: Sequence[int] = ()
    end_ids: frozenset[int] = frozenset()
    mask: Mask | None = None
    parents: Sequence[int] = ()

    @property
    def row_count(self) -> int:
        """The number of the sequence's logits rows."""
        return len(self.drafted) + 1

    @property
    def depths(self) -> Sequence[int]:
        """The number of draft tokens before each row."""
        return [0, *depths(self.parents)] if self.parents else range(self.row_count)

    def drafted_before(self) -> list[list[int]]:
        """Return the draft tokens before each row."""
        found: list[list[int]] = [[]]
        parents = self.parents or range(len(self.drafted))
        for token, parent in zip(self.drafted, parents, strict=True):
            found.append([*found[parent], token])
        return found

    @property
    def plain(self) -> bool:
        """True if the rows need no adjustment."""
        return self.mask is None and not self.sampling.adjusts
