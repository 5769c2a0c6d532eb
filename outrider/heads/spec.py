"""The normal form of a draft head, to which every published dialect is brought.

Auxiliary layer k of a target is the residual stream that enters its layer k, as vLLM counts
auxiliary layers. So k = 0 means the embeddings, and if k is the number of layers, it means the
stream before the final norm. The final state is the input of the target's lm_head, after that norm.
A feature row of one token is the wanted auxiliary layers, in the head's order, and then the final
state if it is wanted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from outrider.errors import OutriderError, Reason

Kind = Literal["eagle3", "peagle", "eagle", "dflash", "dspark", "mtp", "medusa", "redrafter"]
Confidence = Literal["none", "state", "state and token"]
Markov = Literal["none", "vanilla", "gated", "rnn"]


def refusal(where: object, why: str) -> OutriderError:
    """Return the INVALID_VALUE error for an unusable head, in the folder or file `where`."""
    return OutriderError(Reason.INVALID_VALUE, f"{where} is no usable draft head: {why}", "head")


@dataclass(frozen=True, slots=True)
class TargetShape:
    """The target's widths and layers, which a head must fit."""

    hidden_size: int
    layer_count: int
    vocab_size: int
    context_length: int

    @classmethod
    def of(cls, config: Any) -> TargetShape:
        """Read a target's `transformers` configuration."""
        text = config.get_text_config(decoder=True)
        return cls(
            text.hidden_size,
            text.num_hidden_layers,
            text.vocab_size,
            text.max_position_embeddings,
        )


@dataclass(frozen=True, slots=True)
class Decoder:
    """The decoder layers of a head, which are built like Llama's, Qwen2's or Qwen3's.

    `rope` holds `rope_type`, `rope_theta` and a scaling's own numbers, as `transformers` names
    them. `windows` has the sliding window of each layer in positions, None for full attention.
    """

    hidden_size: int
    intermediate_size: int
    layer_count: int
    head_count: int
    kv_head_count: int
    head_size: int
    norm_eps: float
    activation: str
    rope: Mapping[str, Any]
    windows: tuple[int | None, ...]
    projection_bias: bool = False
    """True if the projections to queries, keys and values have a bias."""
    output_bias: bool = False
    head_norms: bool = False
    """True if queries and keys are normed head by head, as in Qwen3."""
    rotary_size: int | None = None
    """The number of a head's first channels that are rotated by position; None for all."""


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """The computation of a head.

    If only some kinds of heads have a field, its docstring begins with these kinds.
    """

    kind: Kind
    target: TargetShape
    draft_vocab_size: int
    aux_layers: tuple[int, ...]
    final_state: bool
    decoder: Decoder | None = None
    """None for medusa and redrafter, which have no attention."""
    other_aux_layers: tuple[tuple[int, ...], ...] = ()
    """Other layers that the file may mean; `reading_choice` compares them with `aux_layers`."""
    other_forms: tuple[HeadSpec, ...] = ()
    """Other forms of the head that its file may mean, for each choice of layers. They differ in
    `scores_normed`, `recycle_normed` or the decoder's `rotary_size`."""
    feature_norms: bool = False
    """eagle3, peagle: each auxiliary layer is normed by itself before `fc`."""
    row_norm: bool = False
    """eagle3, peagle: the whole feature row is normed before `fc`."""
    residual_normed: bool = False
    """eagle3, peagle: the residual is the feature after `hidden_norm`, not before it."""
    recycle_normed: bool = False
    """eagle3: the next step's feature is this step's output after the final norm."""
    scores_normed: bool = True
    """eagle3, peagle: lm_head reads the output after the final norm, not before it."""
    join_bias: bool = False
    """eagle, eagle3, peagle: whether `fc` has a bias; medusa: whether the blocks have a bias."""
    state_first: bool = False
    """mtp: the target's state comes before the embedding where the two are joined."""
    mask_token_id: int | None = None
    """peagle, dflash, dspark: the token in the place of an unknown token; None if the head has the
    embedding `mask_embedding` instead."""
    block_size: int = 0
    """dflash, dspark: the number of a block's rows, the anchor included."""
    anchor_predicts: bool = False
    """dflash, dspark: row i guesses the token after its own place, so a block has one more guess.
    Otherwise row i guesses the token in its place, and the anchor's row guesses nothing."""
    causal_layers: tuple[bool, ...] = ()
    """dflash, dspark: for each layer, whether a row sees no later rows of its block."""
    window_from_anchor: bool = False
    """dflash, dspark: whether all rows of a block see as far back as the anchor does, as
    speculators trains them; otherwise each row sees the window's positions, of which its own is the
    last."""
    markov: Markov = "none"
    """dspark: how the previous token changes the scores of a row."""
    markov_rank: int = 0
    confidence: Confidence = "none"
    """dspark: what the estimate of acceptance is computed from."""
    layer_config: Any | None = field(default=None, repr=False)
    """mtp: the `transformers` configuration of its layer, if the layer is of the target's own kind;
    None for a layer like Llama's."""
    block_counts: tuple[int, ...] = ()
    """medusa: the number of residual blocks in each of its heads; redrafter: in its only head."""

    @property
    def readings(self) -> list[HeadSpec]:
        """The interpretations that the head's file allows, the likeliest first."""
        return [
            replace(form, aux_layers=ids, other_aux_layers=(), other_forms=())
            for form in (self, *self.other_forms)
            for ids in (self.aux_layers, *self.other_aux_layers)
        ]

    @property
    def feature_width(self) -> int:
        """The size of a token's feature row."""
        return (len(self.aux_layers) + self.final_state) * self.target.hidden_size

    @property
    def vocab_size(self) -> int:
        """The number of target ids."""
        return self.target.vocab_size


@dataclass(frozen=True, slots=True)
class Head:
    """A head in normal form.

    `tensors` have the names of the kind's module. If "embed_tokens.weight" or "lm_head.weight" is
    missing, the target's own matrix is used. `target_ids` int64 [draft_vocab_size] maps the head's
    ids to the target's; None if they are the same.
    """

    spec: HeadSpec
    tensors: Mapping[str, torch.Tensor] = field(repr=False)
    target_ids: torch.Tensor | None = field(default=None, repr=False)
