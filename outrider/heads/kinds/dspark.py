"""DSpark: a DFlash block with confidences, in which each token corrects the next row's scores."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import Embedding, Linear, Module

from outrider.heads.kinds.dflash import DFlash
from outrider.heads.model import HeadProposal, HeadSequence, Picker
from outrider.heads.spec import Head
from outrider.sampling.tensors import on


class MarkovHead(Module):
    """Corrects a row's scores by the previous token, with matrices of low rank."""

    def __init__(self, head: Head) -> None:
        super().__init__()
        spec = head.spec
        assert spec.decoder is not None
        rank, hidden = spec.markov_rank, spec.decoder.hidden_size
        self.form = spec.markov
        self.markov_w1 = Embedding(spec.vocab_size, rank)
        self.markov_w2 = Linear(rank, spec.draft_vocab_size, bias=False)
        if self.form == "gated":
            self.gate_proj = Linear(hidden + rank, rank)
        if self.form == "rnn":
            self.joint_proj = Linear(2 * rank + hidden, 3 * rank)

    def step(
        self, before: torch.Tensor, states: torch.Tensor, memory: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the correction [B, draft vocabulary], and the memory [B, rank] for the next row.

        `before` are the embeddings [B, rank] of the tokens before the rows.
        """
        if self.form == "vanilla":
            return self.markov_w2(before), memory
        if self.form == "gated":
            gate = self.gate_proj(torch.cat((states, before), dim=-1)).sigmoid()
            return self.markov_w2(gate * before), memory
        joint = self.joint_proj(torch.cat((memory, before, states), dim=-1))
        gate, candidate, out = joint.chunk(3, dim=-1)
        gate = gate.sigmoid()
        memory = gate * memory + (1 - gate) * candidate.tanh()
        return self.markov_w2(out.tanh()), memory


class ConfidenceHead(Module):
    """Estimates the probability that a row's token is accepted if the tokens before it are."""

    def __init__(self, inputs: int, *, bias: bool) -> None:
        super().__init__()
        self.proj = Linear(inputs, 1, bias=bias)

    def forward(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """Return probabilities [B] for states, or for states and embeddings of previous tokens."""
        out: torch.Tensor = self.proj(torch.cat(parts, dim=-1)).squeeze(-1).float().sigmoid()
        return out


class DSpark(DFlash):
    """A head that guesses from left to right; each guess corrects the scores of the next guess."""

    def __init__(self, head: Head) -> None:
        super().__init__(head)
        spec = head.spec
        assert spec.decoder is not None
        self.markov_head = MarkovHead(head) if spec.markov != "none" else None
        self.confidence_head = None
        if spec.confidence != "none":
            rank = spec.markov_rank if spec.confidence == "state and token" else 0
            bias = "confidence_head.proj.bias" in head.tensors
            self.confidence_head = ConfidenceHead(spec.decoder.hidden_size + rank, bias=bias)

    def guess(self, sequences: Sequence[HeadSequence], count: int, pick: Picker) -> HeadProposal:
        """Guess as HeadModel.guess does, but no more tokens than a block has."""
        rows_BQC = self.block(sequences)
        states_BQC = rows_BQC[:, self.first_row :][:, :count]
        scores_BQV = self.scores(states_BQC)
        tokens = on(self.device, [s.tokens[-1] for s in sequences])
        memory = states_BQC.new_zeros(len(sequences), self.spec.markov_rank)
        if self.markov_head is not None and self.markov_head.form == "rnn" and self.first_row:
            # The memory begins at the anchor's row, which guesses nothing.
            before = self.markov_head.markov_w1(tokens)
            _, memory = self.markov_head.step(before, rows_BQC[:, 0], memory)
        for step in range(states_BQC.shape[1]):
            scores, states = scores_BQV[:, step], states_BQC[:, step]
            parts = [states]
            if self.markov_head is not None:
                before = self.markov_head.markov_w1(tokens)
                correction, memory = self.markov_head.step(before, states, memory)
                scores = scores + correction.float()
                if self.spec.confidence == "state and token":
                    parts.append(before)
            confidences = None if self.confidence_head is None else self.confidence_head(parts)
            tokens = pick(scores, confidences)
        return pick.proposal()
