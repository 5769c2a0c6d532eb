"""A target with random weights, with the sizes that the heads of `head_files` need."""

from __future__ import annotations

from functools import cache

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.heads.loading import load
from outrider.heads.model import HeadModel, TargetWeights
from outrider.heads.spec import Head
from tests.heads.head_files import CONTEXT, LAYERS, TARGET_HIDDEN, VOCAB

ALLOWED = 5
BANNED = tuple(range(ALLOWED, VOCAB))
"""All tokens but the first few, so random heads are often right and texts can be enumerated."""


@cache
def target() -> LlamaForCausalLM:
    """Return the target, whose distributions have several likely tokens.

    The target's weights are larger than a new model's, so that the distributions depend on the
    text.
    """
    torch.manual_seed(4)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=TARGET_HIDDEN,
        intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        eos_token_id=None,
        bos_token_id=None,
    )
    made = LlamaForCausalLM(config)
    made.train(False)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.mul_(12.0)
    return made


def load_for_target(head: Head, page_count: int, page_size: int) -> HeadModel:
    """Return a head with the target's embeddings and lm_head, and an empty cache."""
    weights = target().state_dict()
    matrices = TargetWeights(weights["model.embed_tokens.weight"], weights["lm_head.weight"])
    return load(head, matrices, page_count=page_count, page_size=page_size)
