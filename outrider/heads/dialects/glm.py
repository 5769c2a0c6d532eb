"""The MTP layer of GLM-4.5 and 4.6 (glm4_moe): a layer of `transformers`, with experts.

The target's own files contain the MTP layer, numbered as one more layer after the target's layers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig
from transformers.activations import ACT2FN

from outrider.heads.files import BY_VLLM, Keys, Weights, open_weights
from outrider.heads.spec import Decoder, Head, HeadSpec, TargetShape, refusal

MODEL_TYPE = "glm4_moe"
_BLOCK = "layers.0.block."


def read_glm(keys: Keys, folder: Path, target: TargetShape) -> Head:
    """Bring the MTP layer to the normal form. Raises OutriderError(INVALID_VALUE)."""
    count = keys.integer("num_nextn_predict_layers")
    if count != 1:
        raise keys.wrong("num_nextn_predict_layers", f"must be 1, not {count}; {BY_VLLM}")
    prefix = f"model.layers.{target.layer_count}."
    weights = open_weights(folder, lambda name: name.startswith(prefix))
    if not weights.names:
        raise refusal(folder, f"it has no weights {prefix}*")
    weights.rename(lambda name: name.removeprefix(prefix))
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False).get_mtp_config()
    # `transformers` raises errors of many types for a wrong config.
    except Exception as cause:
        why = " ".join(str(cause).split())
        raise refusal(folder, f"its config.json cannot be read ({why})") from cause
    if config.hidden_size != target.hidden_size:
        why = f"is {config.hidden_size}, but the target's is {target.hidden_size}"
        raise keys.wrong("hidden_size", why)
    decoder = _decoder(keys, config)
    hidden = decoder.hidden_size
    weights.take("enorm.weight", hidden, to="token_layernorm.weight")
    weights.take("hnorm.weight", hidden, to="hidden_layernorm.weight")
    weights.take("eh_proj.weight", hidden, 2 * hidden, to="fc.weight")
    weights.take("shared_head.norm.weight", hidden, to="norm.weight")
    # The skipped tensors are copies of the target's tensors.
    weights.skip("embed_tokens.weight", "shared_head.head.weight")
    _take_attention(weights, decoder)
    _take_experts(weights, config)
    spec = HeadSpec(
        kind="mtp",
        target=target,
        draft_vocab_size=target.vocab_size,
        aux_layers=(),
        final_state=True,
        decoder=decoder,
        layer_config=config,
    )
    return Head(spec, weights.finish())


def _decoder(keys: Keys, config: Any) -> Decoder:
    rope = Keys(keys.path, dict(config.rope_parameters), "rope_parameters.")
    kind = rope.text("rope_type", "default")
    if kind != "default":
        raise keys.wrong("rope_parameters", f"has the type {kind!r}; {BY_VLLM}")
    part = rope.number("partial_rotary_factor", 1.0)
    if part > 1:
        raise rope.wrong("partial_rotary_factor", f"must be at most 1, not {part!r}")
    heads = keys.integer("num_attention_heads", config.num_attention_heads)
    size = keys.integer("head_dim", config.hidden_size // heads)
    if config.hidden_act not in ACT2FN:
        why = f"is {config.hidden_act!r}, which transformers does not have"
        raise keys.wrong("hidden_act", why)
    return Decoder(
        hidden_size=config.hidden_size,
        intermediate_size=config.moe_intermediate_size,
        layer_count=1,
        head_count=heads,
        kv_head_count=config.num_key_value_heads,
        head_size=size,
        norm_eps=config.rms_norm_eps,
        activation=config.hidden_act,
        rope={"rope_type": "default", "rope_theta": rope.number("rope_theta")},
        windows=(None,),
        projection_bias=config.attention_bias,
        head_norms=config.use_qk_norm,
        rotary_size=int(size * part),
    )


def _take_attention(weights: Weights, decoder: Decoder) -> None:
    hidden, size = decoder.hidden_size, decoder.head_size
    for name in ("input_layernorm", "post_attention_layernorm"):
        weights.take(f"{name}.weight", hidden, to=f"{_BLOCK}{name}.weight")
    counts = {"q": decoder.head_count, "k": decoder.kv_head_count, "v": decoder.kv_head_count}
    for letter, count in counts.items():
        name = f"self_attn.{letter}_proj"
        weights.take(f"{name}.weight", count * size, hidden, to=f"{_BLOCK}{name}.weight")
        if decoder.projection_bias:
            weights.take(f"{name}.bias", count * size, to=f"{_BLOCK}{name}.bias")
        if decoder.head_norms and letter != "v":
            norm = f"self_attn.{letter}_norm.weight"
            weights.take(norm, size, to=_BLOCK + norm)
    out = "self_attn.o_proj.weight"
    weights.take(out, hidden, decoder.head_count * size, to=_BLOCK + out)


def _take_experts(weights: Weights, config: Any) -> None:
    """Take router and experts; `transformers` has the experts' matrices in two tensors."""
    hidden, inner, count = config.hidden_size, config.moe_intermediate_size, config.n_routed_experts
    weights.take("mlp.gate.weight", count, hidden, to=f"{_BLOCK}mlp.gate.weight")
    bias = "mlp.gate.e_score_correction_bias"
    weights.take(bias, count, to=_BLOCK + bias)
    shared = inner * config.n_shared_experts
    _take_mlp(weights, "mlp.shared_experts.", hidden, shared, to=f"{_BLOCK}mlp.shared_experts.")
    both, down = [], []
    for i in range(count):
        _take_mlp(weights, f"mlp.experts.{i}.", hidden, inner, to="")
        parts = [weights.taken.pop(f"{name}_proj.weight") for name in ("gate", "up", "down")]
        both.append(torch.cat(parts[:2]))
        down.append(parts[2])
    weights.taken[f"{_BLOCK}mlp.experts.gate_up_proj"] = torch.stack(both)
    weights.taken[f"{_BLOCK}mlp.experts.down_proj"] = torch.stack(down)


def _take_mlp(weights: Weights, prefix: str, hidden: int, inner: int, *, to: str) -> None:
    for name in ("gate_proj.weight", "up_proj.weight"):
        weights.take(prefix + name, inner, hidden, to=to + name)
    weights.take(f"{prefix}down_proj.weight", hidden, inner, to=f"{to}down_proj.weight")
