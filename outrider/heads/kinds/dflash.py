"""DFlash: a block of masks after the text, filled by one forward.

Features become keys and values without any layer running over them: row i of the cache depends only
on feature i. A block has its anchor, which is the last committed token, and then masks. The rows of
a block see all committed tokens and each other, unless a layer has a window or is causal. Nothing
of a block stays in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import ModuleList, Parameter, RMSNorm

from outrider.heads.model import HeadModel, HeadProposal, HeadSequence, Picker
from outrider.heads.modules import Attention, HeadRows, Layer
from outrider.heads.spec import Decoder, Head
from outrider.lm.fused_linear import ATTENTION, SIBLINGS
from outrider.lm.layout import SequenceSlice
from outrider.sampling.tensors import on


class DFlash(HeadModel):
    """A head whose guesses do not see each other: all are scored before the first is chosen."""

    pairs = False
    # The rows of the text have no queries.
    siblings = (ATTENTION[1:], *SIBLINGS[1:])

    def __init__(self, head: Head) -> None:
        super().__init__(head)
        if head.spec.decoder is None:
            raise ValueError("a head of the kind dflash must have decoder layers")
        decoder: Decoder = head.spec.decoder
        hidden, eps = decoder.hidden_size, decoder.norm_eps
        self.hidden_norm = RMSNorm(hidden, eps=eps)
        self.layers = ModuleList(Layer(decoder, i) for i in range(decoder.layer_count))
        self.norm = RMSNorm(hidden, eps=eps)
        if head.spec.mask_token_id is None:
            self.mask_embedding = Parameter(torch.empty(hidden))

    def read_rows(self, slices: list[SequenceSlice], features: torch.Tensor) -> torch.Tensor:
        """Read rows as HeadModel.read_rows does; the result only marks that rows were read."""
        rows = self.rows(slices)
        context: torch.Tensor = self.hidden_norm(features)
        for attention, arrays in self._attentions():
            written = attention.keys_and_values(context, rows.cos, rows.sin)
            for array, numbers in zip(arrays, written, strict=True):
                array.index_copy_(0, rows.layout.slot_mapping, numbers)
        return context[rows.layout.logits_indices]

    def guess(self, sequences: Sequence[HeadSequence], count: int, pick: Picker) -> HeadProposal:
        """Guess as HeadModel.guess does, but no more tokens than a block has."""
        states_BQC = self.block(sequences)[:, self.first_row :][:, :count]
        scores_BQV = self.scores(states_BQC)
        for step in range(states_BQC.shape[1]):
            pick(scores_BQV[:, step])
        return pick.proposal()

    @property
    def first_row(self) -> int:
        """The index of a block's first row that guesses a token."""
        return 0 if self.spec.anchor_predicts else 1

    def block(self, sequences: Sequence[HeadSequence]) -> torch.Tensor:
        """Return the normed states [B, block size, hidden size] of a block's rows."""
        size = self.spec.block_size
        masks = [self.spec.mask_token_id or 0] * (size - 1)
        slices = [
            SequenceSlice([s.tokens[-1], *masks], s.kv.num_computed_tokens, s.kv.pages, 0)
            for s in sequences
        ]
        rows = self.rows(slices)
        x = self.embed(rows.layout.token_ids)
        if self.spec.mask_token_id is None:
            x.view(len(slices), size, -1)[:, 1:] = self.mask_embedding
        lengths_B = on(self.device, [part.start for part in slices])
        page_size = rows.layout.page_size
        width = -(-max(part.end for part in slices) // page_size) * page_size
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            seen_BQK = self._seen(lengths_B, width, layer, self.spec.causal_layers[i])
            x = self._run(layer, x, rows, seen_BQK)
        states_BQC: torch.Tensor = self.norm(x).view(len(slices), size, -1)
        return states_BQC

    def _run(
        self, layer: Layer, x: torch.Tensor, rows: HeadRows, seen_BQK: torch.Tensor
    ) -> torch.Tensor:
        assert self.cache is not None
        cache = self.cache.layers[layer.index]
        normed = layer.input_layernorm(x)
        return layer.finish(x + layer.self_attn.attend_blocks(normed, rows, cache, seen_BQK))

    def _seen(
        self, lengths_B: torch.Tensor, width: int, layer: Layer, causal: bool
    ) -> torch.Tensor:
        """Return whether a block's row sees a key: bool [B, block size, width + block size].

        The keys are the first `width` places of the sequence, then the rows of the block.
        """
        size, window = self.spec.block_size, layer.self_attn.softmax.window
        places_K = torch.arange(width, device=self.device)
        rows_Q = torch.arange(size, device=self.device)
        lengths_B11 = lengths_B[:, None, None]
        text_BQK = (places_K < lengths_B11).expand(-1, size, -1)
        if window is not None:
            # The anchor is in the place after the text.
            first_Q = -window + (0 * rows_Q if self.spec.window_from_anchor else rows_Q + 1)
            text_BQK = text_BQK & (places_K >= lengths_B11 + first_Q[:, None])
        block_QQ = rows_Q <= rows_Q[:, None] if causal else rows_Q < size
        return torch.cat((text_BQK, block_QQ.expand(len(lengths_B), size, size)), dim=-1)

    def _attentions(self) -> list[tuple[Attention, list[torch.Tensor]]]:
        """Return each layer's attention with the arrays of its keys and values."""
        assert self.cache is not None
        caches = self.cache.layers
        modules = [layer.self_attn for layer in self.layers if isinstance(layer, Layer)]
        return [(module, cache.arrays) for module, cache in zip(modules, caches, strict=True)]
