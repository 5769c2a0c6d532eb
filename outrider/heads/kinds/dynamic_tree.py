"""Dynamic draft trees, which grow by level, as in EAGLE-2 (arXiv 2406.16858).

A forward follows the main guess of a level and the likeliest others: those with the greatest
product of shares along their path. The forward's rows are the whole tree so far, because a row of a
tree sees only the text and rows of its own forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nlargest
from math import prod
from typing import NamedTuple

import torch

from outrider.heads.model import Branch, HeadSequence
from outrider.lm.layout import SequenceSlice

WIDTH = 4
"""The number of a level's guesses that are followed.

With 8, tokens per forward rise by at most 2 %.
"""


class Node(NamedTuple):
    """A guess. `path` has the tokens from the text to this guess.

    `shares` are the head's estimated probabilities of these tokens. `parent` is the row of the
    guess before it, from 1 on; 0 is the text. The path's first `at` guesses are the chain's.
    """

    parent: int
    at: int
    path: list[int]
    shares: list[float]


class Tree:
    """The tree of one sequence while it grows."""

    def __init__(self, sequence: HeadSequence) -> None:
        assert sequence.state is not None
        self.rows: list[Node] = []
        self.states = [sequence.state]
        """The text's state, then a state for each row."""
        self.features: list[torch.Tensor] = []
        self._sequence = sequence
        self._last: list[Node] = []
        self.branches: list[Branch] = []
        """The guesses beside the chain that are deeper than one token."""

    def add(self, row: int, tokens: Sequence[int], shares: Sequence[float]) -> None:
        """Add the guesses after a row, the main guess first."""
        parent = self.rows[row - 1] if row else Node(0, 0, [], [])
        on_chain = parent.at == len(parent.path)
        for i, (token, share) in enumerate(zip(tokens, shares, strict=True)):
            at = parent.at + (on_chain and i == 0)
            node = Node(row, at, [*parent.path, token], [*parent.shares, share])
            if at == len(node.path) or share > 0.0:
                self._last.append(node)
            if not on_chain:
                self.branches.append(Branch(at, node.path[at:], node.shares[at:]))

    def follow(self) -> list[Node]:
        """Make rows of the last level's best guesses. The chain's guess is the first row."""
        main, *others = self._last
        new = [main, *nlargest(WIDTH - 1, others, key=lambda node: prod(node.shares))]
        self.rows += new
        self._last = []
        return new

    def slice(self, new: int) -> SequenceSlice:
        """Return all rows; the forward reads out the last `new` rows."""
        kv = self._sequence.kv
        tokens = [node.path[-1] for node in self.rows]
        parents = [node.parent for node in self.rows]
        return SequenceSlice(tokens, kv.num_computed_tokens, kv.pages, new, parents)
