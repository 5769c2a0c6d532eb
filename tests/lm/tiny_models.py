"""Tiny decoders with random weights, one for each kind of attention to test."""

from copy import deepcopy
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GptOssConfig,
    GraniteSWAConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen3Config,
)

VOCAB_SIZE = 97
CONTEXT_LENGTH = 256
# The window is smaller than the tests' texts, and no multiple of a page's size.
WINDOW = 19
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": CONTEXT_LENGTH,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ALTERNATING = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}

CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "llama, one head for all": LlamaConfig(**SIZES | {"num_key_value_heads": 1}),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
    "mistral, sliding window": MistralConfig(**SIZES, sliding_window=WINDOW),
    "phi3, fused projections": Phi3Config(**SIZES, sliding_window=None),
    "gemma": GemmaConfig(**SIZES, head_dim=16),
    "gemma2, soft cap and alternating windows": Gemma2Config(
        **SIZES, **_ALTERNATING, head_dim=16, attn_logit_softcapping=0.5, query_pre_attn_scalar=16
    ),
    "gemma3, alternating windows": Gemma3TextConfig(
        **SIZES, **_ALTERNATING, head_dim=16, query_pre_attn_scalar=16
    ),
    "gpt_oss, sinks and alternating windows": GptOssConfig(
        **SIZES, **_ALTERNATING, head_dim=16, num_local_experts=4, num_experts_per_tok=2
    ),
    "granite_swa, sinks and alternating windows": GraniteSWAConfig(**SIZES, **_ALTERNATING),
    # The tests' texts are longer than a piece of attention, and longer than a run of positions with
    # the same temperature.
    "llama4, pieces and temperatures by position": Llama4TextConfig(
        **SIZES,
        head_dim=16,
        intermediate_size_mlp=48,
        num_local_experts=2,
        num_experts_per_tok=1,
        attention_chunk_size=WINDOW,
        floor_scale=8,
        no_rope_layers=[1, 0, 1],
    ),
    "gpt2, learned positions": GPT2Config(
        vocab_size=VOCAB_SIZE,
        n_positions=CONTEXT_LENGTH,
        n_embd=32,
        n_layer=3,
        n_head=4,
        bos_token_id=1,
        eos_token_id=2,
    ),
}


def build(config: PreTrainedConfig, seed: int = 0) -> Any:
    """Create a float32 model with weights so large that logits depend on the context."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(deepcopy(config), dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "embed" not in name:
                parameter.mul_(5)
            elif "sinks" in name:
                # Random sinks are nearly equal, so a test would hardly notice wrong sinks.
                parameter.copy_(torch.linspace(-2, 4, len(parameter)))
    return model
