"""ReDrafter: a recurrent network that starts at the target's final state (arXiv 2403.09919).

The final state of the token before the last is the context of all guesses of a round. The recurrent
state begins at zero; it reads the last committed token, and then guess after guess. The scores
depend on context and recurrent state. Where trees are verified, a tree takes the place of the
paper's beam: each level continues from the chain's guess and from the likeliest other guesses.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import Identity, Linear, Module, ModuleList
from torch.nn.functional import silu

from outrider.heads.kinds.dynamic_tree import Node, Tree, grow, tree_rows
from outrider.heads.model import HeadModel, HeadProposal, HeadSequence, Picker
from outrider.heads.spec import Head
from outrider.sampling.tensors import on


class ReDrafter(HeadModel):
    """A head that keeps one feature a sequence and no keys or values.

    Within a round, a state [2 * hidden size] is the context, followed by the recurrent state.
    """

    def __init__(self, head: Head) -> None:
        super().__init__(head)
        hidden = head.spec.target.hidden_size
        size = head.tensors["lm_head.weight"].shape[1]
        joins = "input_proj.weight" in head.tensors
        self.input_proj: Module = Linear(2 * hidden, size) if joins else Identity()
        (count,) = head.spec.block_counts
        self.blocks = ModuleList(Linear(size, size) for _ in range(count))
        # A head without these two matrices adds up the tokens' embeddings.
        self.adds_up = "rnn_w.weight" not in head.tensors
        if not self.adds_up:
            self.rnn_w = Linear(hidden, hidden, bias=False)
            self.rnn_u = Linear(hidden, hidden)

    def guess(self, sequences: Sequence[HeadSequence], count: int, pick: Picker) -> HeadProposal:
        """Guess as HeadModel.guess does."""
        contexts = torch.stack([s.state for s in sequences if s.state is not None])
        before = torch.cat((contexts, torch.zeros_like(contexts)), dim=-1)
        tokens = on(contexts.device, [s.tokens[-1] for s in sequences])
        states = self._read(tokens, before)
        if pick.width > 1 and tree_rows(count):
            return self._grow(sequences, states, count, pick)
        for step in range(count):
            tokens = pick(self._state_scores(states))
            if step < count - 1:
                states = self._read(tokens, states)
        return pick.proposal()

    def _grow(
        self, sequences: Sequence[HeadSequence], states: torch.Tensor, count: int, pick: Picker
    ) -> HeadProposal:
        """Guess trees, level by level."""
        trees = [Tree(s, state) for s, state in zip(sequences, states, strict=True)]

        def run(new: Sequence[Sequence[Node]], before: torch.Tensor) -> torch.Tensor:
            tokens = [node.path[-1] for nodes in new for node in nodes]
            return self._read(on(before.device, tokens), before)

        return grow(trees, count, pick, self._state_scores, run)

    def _read(self, tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Return the states [R, 2 * hidden size] after reading tokens [R] in these states."""
        contexts, before = states.chunk(2, dim=-1)
        read = self.embed(tokens)
        after = read + before if self.adds_up else silu(self.rnn_w(read) + self.rnn_u(before))
        return torch.cat((contexts, after), dim=-1)

    def _state_scores(self, states: torch.Tensor) -> torch.Tensor:
        """Return the float32 scores [R, V] of the next token."""
        x = self.input_proj(states)
        for block in self.blocks:
            x = x + silu(block(x))
        return self.scores(x)
