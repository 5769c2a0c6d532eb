"""The shared part of EAGLE-3, EAGLE and MTP, which draft step by step from (feature, next token).

The first guess comes from the row of the last true feature. Each later step takes the previous
step's state in place of the feature that the target has not computed. The rows of later steps come
right after the text, and later rows of true features overwrite them. Where trees are verified, each
step continues from several guesses.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch

from outrider.heads.kinds.dynamic_tree import Node, Tree, grow, tree_rows
from outrider.heads.model import HeadModel, HeadProposal, HeadSequence, Picker
from outrider.heads.modules import RotaryRows
from outrider.heads.round_graphs import RoundGraphs
from outrider.heads.spec import Decoder, Head, HeadSpec
from outrider.lm.attention import LayerCache
from outrider.lm.layout import SequenceSlice


class AutoregressiveModel(HeadModel):
    """A head whose rows are pairs of feature and next token.

    Subclasses say how to run a pair, and how to recycle its state.
    """

    def __init__(self, head: Head) -> None:
        super().__init__(head)
        if head.spec.decoder is None:
            raise ValueError(f"a head of the kind {head.spec.kind} must have decoder layers")
        self.decoder: Decoder = head.spec.decoder
        self.graphs: RoundGraphs | None = None
        """The captured CUDA graphs of rounds without a `rank`; None before `capture`."""

    @property
    def caches(self) -> list[LayerCache]:
        """The caches of the layers."""
        return [] if self.cache is None else self.cache.layers

    @abstractmethod
    def run(self, tokens: torch.Tensor, features: torch.Tensor, rows: RotaryRows) -> torch.Tensor:
        """Run pairs of target ids [T] and projected features; return states [T, ·]."""

    @abstractmethod
    def recycle(self, states: torch.Tensor) -> torch.Tensor:
        """Make the next step's projected features from this step's states."""

    @abstractmethod
    def state_scores(self, states: torch.Tensor) -> torch.Tensor:
        """Return the float32 scores [B, draft vocabulary] of the next token."""

    def read_as(self, spec: HeadSpec) -> None:
        """Do what HeadModel.read_as does, and drop the graphs of the previous interpretation."""
        super().read_as(spec)
        self.graphs = None

    @torch.inference_mode()
    def capture(self, width: int) -> None:
        """Like HeadModel.capture."""
        if self.cache is not None and self.cache.can_capture:
            self.graphs = RoundGraphs(self, width)

    def read_rows(self, slices: list[SequenceSlice], features: torch.Tensor) -> torch.Tensor:
        """Like HeadModel.read_rows."""
        rows = self.rows(slices)
        states = self.run(rows.layout.token_ids, features, rows)
        return states[rows.layout.logits_indices]

    def tree_rows(self, count: int) -> int:
        """Like HeadModel.tree_rows."""
        return tree_rows(count)

    def guess(self, sequences: Sequence[HeadSequence], count: int, pick: Picker) -> HeadProposal:
        """Like HeadModel.guess."""
        if self.graphs is not None and pick.rank is None:
            found = self.graphs.propose(sequences, count, pick.width)
            if found is not None:
                return found
        if pick.width > 1 and self.tree_rows(count):
            return self._grow(sequences, count, pick)
        states = torch.stack([s.state for s in sequences if s.state is not None])
        tokens = pick(self.state_scores(states))
        for step in range(count - 1):
            # The tokens stay on the device: the slices serve only to find slots and positions.
            slices = [
                SequenceSlice([0], s.kv.num_computed_tokens + step, s.kv.pages, 1)
                for s in sequences
            ]
            states = self.run(tokens, self.recycle(states), self.rows(slices))
            tokens = pick(self.state_scores(states))
        return pick.proposal()

    def _grow(self, sequences: Sequence[HeadSequence], count: int, pick: Picker) -> HeadProposal:
        """Guess trees, level by level."""
        trees = [Tree(s, s.state) for s in sequences if s.state is not None]

        def run(new: Sequence[Sequence[Node]], before: torch.Tensor) -> torch.Tensor:
            rows = self.rows(
                [tree.slice(len(nodes)) for tree, nodes in zip(trees, new, strict=True)]
            )
            added = torch.split(self.recycle(before), [len(nodes) for nodes in new])
            for tree, features in zip(trees, added, strict=True):
                tree.features.append(features)
            features = torch.cat([part for tree in trees for part in tree.features])
            return self.run(rows.layout.token_ids, features, rows)[rows.layout.logits_indices]

        return grow(trees, count, pick, self.state_scores, run)
