"""An EAGLE-3 head of any size with random weights, made in memory."""

from __future__ import annotations

import torch

from outrider.heads.kinds.eagle3 import Eagle3
from outrider.heads.loading import load
from outrider.heads.model import HeadModel, TargetWeights
from outrider.heads.spec import Decoder, Head, HeadSpec, TargetShape

_CONTEXT = 8192
_LAYERS = 32
# Small weights, so that numbers stay finite in any type.
_SCALE = 0.02


def random_eagle3(
    *,
    hidden_size: int,
    intermediate_size: int,
    head_count: int,
    kv_head_count: int,
    vocab_size: int,
    draft_vocab_size: int,
    page_count: int,
    dtype: torch.dtype,
    device: torch.device,
) -> HeadModel:
    """Make the head, loaded on a device; its embeddings are those of a target of as many tokens."""
    decoder = Decoder(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        layer_count=1,
        head_count=head_count,
        kv_head_count=kv_head_count,
        head_size=hidden_size // head_count,
        norm_eps=1e-5,
        activation="silu",
        rope={"rope_type": "default", "rope_theta": 500_000.0},
        windows=(None,),
    )
    spec = HeadSpec(
        kind="eagle3",
        target=TargetShape(hidden_size, _LAYERS, vocab_size, _CONTEXT),
        draft_vocab_size=draft_vocab_size,
        boundaries=(2, _LAYERS // 2, _LAYERS - 3),
        final_state=False,
        decoder=decoder,
    )

    def random(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype).uniform_(-_SCALE, _SCALE)

    with torch.device("meta"):
        shapes = Eagle3(Head(spec, {})).state_dict()
    tensors = {name: random(*like.shape) for name, like in shapes.items()}
    tensors["fc.weight"] = random(hidden_size, 3 * hidden_size)
    tensors["lm_head.weight"] = random(draft_vocab_size, hidden_size)
    embeddings = random(vocab_size, hidden_size)
    ids = torch.randperm(vocab_size)[:draft_vocab_size].sort().values
    weights = TargetWeights(embeddings, embeddings)
    head = Head(spec, tensors, ids)
    return load(head, weights, page_count=page_count, dtype=dtype, device=device)
