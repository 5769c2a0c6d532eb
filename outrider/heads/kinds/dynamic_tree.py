"""Dynamic draft trees, which grow by level, as in EAGLE-2 (arXiv 2406.16858).

A forward continues from the chain's guess of a level and from the likeliest other guesses: those
with the greatest product of shares along their path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import nlargest
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import torch

from outrider.heads.model import Branch, HeadProposal, HeadSequence, Picker
from outrider.lm.layout import SequenceSlice
from outrider.protocol.token_tree import MAX_TREE_TOKENS
from outrider.sampling.tensors import fetch, on

WIDTH = 4
"""The number of a level's guesses from which the next level continues.

With 8 in place of 4, tokens per forward rise by at most 2 %.
"""


def tree_rows(count: int) -> int:
    """Count the rows that a tree of `count` levels reads; 0 for more levels than trees may have."""
    rows = WIDTH * (count - 1)
    return rows if rows <= MAX_TREE_TOKENS else 0


class Node(NamedTuple):
    """A guess. `path` has the guesses after the text, up to this guess.

    `shares` are the head's estimated probabilities of the guesses in `path`. `parent` is the row of
    the previous guess, from 1 on; 0 is the text. The path's first `at` guesses are the chain's.
    """

    parent: int
    at: int
    path: list[int]
    shares: list[float]


class Tree:
    """The tree of one sequence while it grows from the text's state."""

    def __init__(self, sequence: HeadSequence, state: torch.Tensor) -> None:
        self.rows: list[Node] = []
        self.states = [state]
        """The text's state, then a state for each row."""
        self.features: list[torch.Tensor] = []
        self._sequence = sequence
        self._last: list[Node] = []
        self.branches: list[Branch] = []
        """The guesses that follow a guess beside the chain."""

    def add(self, row: int, tokens: Sequence[int], shares: Sequence[float]) -> None:
        """Add the guesses after a row, the chosen guess first."""
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
        """Turn the last level's best guesses into rows; return them, the chain's guess first."""
        main, *others = self._last
        new = [main, *nlargest(WIDTH - 1, others, key=lambda node: prod(node.shares))]
        self.rows += new
        self._last = []
        return new

    def slice(self, new: int) -> SequenceSlice:
        """Return a slice of all rows, whose forward reads out only the last `new` rows.

        The earlier rows are repeated, because a row of a tree sees only the text and the rows of
        its own forward.
        """
        kv = self._sequence.kv
        tokens = [node.path[-1] for node in self.rows]
        parents = [node.parent for node in self.rows]
        return SequenceSlice(tokens, kv.num_computed_tokens, kv.pages, new, parents)


def grow(
    trees: Sequence[Tree],
    count: int,
    pick: Picker,
    scores: Callable[[torch.Tensor], torch.Tensor],
    run: Callable[[Sequence[Sequence[Node]], torch.Tensor], torch.Tensor],
) -> HeadProposal:
    """Guess trees of `count` levels, level by level.

    `scores` maps states [R, ·] to scores [R, draft vocabulary]. `run` gets each tree's new rows and
    the states [R, ·] before these rows, and returns the rows' own states [R, ·].
    """
    states = torch.stack([tree.states[0] for tree in trees])
    best, shares = pick.ranked([(i, []) for i in range(len(trees))], scores(states))
    pick.take(best, shares)
    for tree, *ranked in zip(trees, *_lists(best, shares), strict=True):
        tree.add(0, *ranked)
    for _ in range(count - 1):
        new = [tree.follow() for tree in trees]
        before = [
            tree.states[node.parent]
            for tree, nodes in zip(trees, new, strict=True)
            for node in nodes
        ]
        states = run(new, torch.stack(before))
        places = [(i, node.path) for i, nodes in enumerate(new) for node in nodes]
        best, shares = pick.ranked(places, scores(states))
        firsts = [0, *accumulate(len(nodes) for nodes in new[:-1])]
        firsts_B = on(best.device, firsts)
        pick.take(best.index_select(0, firsts_B), shares.index_select(0, firsts_B))
        lists = zip(places, states, *_lists(best, shares), strict=True)
        for (i, _), state, tokens, values in lists:
            trees[i].states.append(state)
            trees[i].add(len(trees[i].states) - 1, tokens, values)
    return pick.proposal([tree.branches for tree in trees])


def _lists(best: torch.Tensor, shares: torch.Tensor) -> list[Any]:
    """Return both tensors as lists, after one wait for the device."""
    return [array.tolist() for array in fetch([best, shares])]
