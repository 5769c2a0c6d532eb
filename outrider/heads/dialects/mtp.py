"""Multi-token prediction (MTP): layers of the target's own files. Reads MiMo-7B's."""

from __future__ import annotations

from dataclasses import replace

from outrider.heads.dialects.decoder import read_decoder, take_layers
from outrider.heads.files import BY_VLLM, Keys, Weights
from outrider.heads.spec import Head, HeadSpec, TargetShape, refusal

PREFIX = "model.mtp_layers."
# Keys by which a target's config says how many MTP layers its files have.
COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")


def is_mtp_weight(name: str) -> bool:
    """Return whether a tensor of MiMo's files belongs to its MTP layers."""
    return name.startswith(PREFIX)


def refuse_others(keys: Keys) -> None:
    """Raise OutriderError for MTP layers that neither this file nor glm.py reads."""
    if keys.text("model_type", "") == "mimo":
        return
    why = (
        f"is {keys.text('model_type', '')!r}, and only the MTP layers of MiMo-7B (mimo) and GLM-4.5"
        f" (glm4_moe) are read; those of DeepSeek, Qwen3-Next and others need latent or linear"
        f" attention, which heads lack here; {BY_VLLM}"
    )
    raise keys.wrong("model_type", why)


def read_mtp(keys: Keys, weights: Weights, target: TargetShape) -> Head:
    """Bring MiMo-7B's MTP layer to the normal form. Raises OutriderError(INVALID_VALUE)."""
    count = keys.integer("num_nextn_predict_layers")
    if count != 1:
        raise keys.wrong("num_nextn_predict_layers", f"must be 1, not {count}; {BY_VLLM}")
    if not weights.names:
        raise refusal(weights.path, f"it has no weights {PREFIX}*")
    first = f"{PREFIX}0."
    inside = ("self_attn.", "mlp.", "input_layernorm.", "post_attention_layernorm.")
    weights.rename(
        lambda name: (
            name.replace(first, "layers.0.")
            if name.removeprefix(first).startswith(inside)
            else name.removeprefix(first)
        )
    )
    full = read_decoder(keys, weights)
    decoder = replace(full, layer_count=1, windows=(None,))
    hidden = decoder.hidden_size
    if hidden != target.hidden_size:
        raise keys.wrong("hidden_size", f"is {hidden}, but the target's is {target.hidden_size}")
    weights.take("token_layernorm.weight", hidden)
    weights.take("hidden_layernorm.weight", hidden)
    weights.take("input_proj.weight", hidden, 2 * hidden, to="fc.weight")
    weights.take("final_layernorm.weight", hidden, to="norm.weight")
    take_layers(weights, decoder, first_input=hidden)
    spec = HeadSpec(
        kind="mtp",
        target=target,
        draft_vocab_size=target.vocab_size,
        aux_layers=(),
        final_state=True,
        decoder=decoder,
        state_first=True,
    )
    return Head(spec, weights.finish())
