"""EAGLE-3 and P-EAGLE.

Reads the files of SafeAILab, SpecForge, AngelSlim, ModelOpt, speculators and DeepSpec.
"""

from __future__ import annotations

from dataclasses import replace

from outrider.heads.dialects.decoder import (
    aux_layer_count,
    check_target_size,
    choose_aux_layers,
    mask_token,
    possible_aux_layers,
    read_decoder,
    take_layers,
    take_vocabulary,
    with_partial_rotary,
)
from outrider.heads.files import Keys, Weights
from outrider.heads.spec import Decoder, Head, HeadSpec, TargetShape

# Keys of ModelOpt's eagle_config that change the layer, with the values that are supported.
_MODELOPT = {
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
}


def read_eagle3(
    keys: Keys, weights: Weights, target: TargetShape, layers: tuple[int, ...] | None
) -> Head:
    """Bring an EAGLE-3 or P-EAGLE head to the normal form.

    Raises OutriderError(INVALID_VALUE).
    """
    by_speculators = "speculators_model_type" in keys
    is_midlayer = any(name.startswith("midlayer.") for name in weights.names)
    weights.rename(lambda name: name.removeprefix("model.").replace("midlayer.", "layers.0."))
    weights.skip("verifier_norm.weight", "verifier_lm_head.weight")
    nested = keys.section("eagle_config")
    _refuse_modelopt(nested)
    check_target_size(keys, target)
    layer_keys = keys.section("transformer_layer_config") if by_speculators else keys
    decoder = read_decoder(layer_keys, weights, by_transformers=not is_midlayer)
    stated = keys.integer("draft_vocab_size") if "draft_vocab_size" in keys else None
    size, ids = take_vocabulary(layer_keys, weights, target, decoder.hidden_size, stated)
    feature_norms = keys.flag("fc_norm", nested.flag("fc_norm", False))
    row_norm = keys.flag("norm_before_fc", nested.flag("norm_before_fc", False))
    if feature_norms and row_norm:
        raise keys.wrong("fc_norm", "and norm_before_fc exclude each other")
    is_parallel = "mask_hidden" in weights
    last = layer_keys.integer("vocab_size", target.vocab_size) - 1
    token = mask_token(keys, last, keys.section("dflash_config")) if is_parallel else None
    if is_parallel and token is None:
        raise keys.wrong("mask_token_id", "is missing, which a head with mask_hidden needs")
    aux_layers, others = _aux_layers(keys, nested, weights, target, layers)
    if not aux_layers and decoder.hidden_size != target.hidden_size:
        why = f"is {decoder.hidden_size}; without fc it must be {target.hidden_size}"
        raise keys.wrong("hidden_size", why)
    norm_output = keys.flag("norm_output", False)
    spec = HeadSpec(
        kind="peagle" if is_parallel else "eagle3",
        target=target,
        draft_vocab_size=size,
        aux_layers=aux_layers,
        final_state=not aux_layers,
        decoder=decoder,
        other_aux_layers=others,
        feature_norms=feature_norms,
        row_norm=row_norm,
        # A speculators file without the key is an early EAGLE-3 head, and such heads normalise the
        # residual.
        residual_normed=keys.flag("norm_before_residual", by_speculators and not is_parallel),
        # SpecForge's norm_output is about the norm before lm_head. Every head has the weights of
        # this norm. Only EAGLE-3.1, which norms its features as well, recycles the normed output.
        recycle_normed=norm_output and (feature_norms or not is_midlayer),
        join_bias="fc.bias" in weights,
        mask_token_id=token,
    )
    forms = [spec]
    if is_midlayer and spec.recycle_normed:
        # SpecForge trains EAGLE-3.1 on the state before the norm, but vLLM recycles the normed
        # state.
        forms.append(replace(spec, recycle_normed=False))
    if is_midlayer and "norm_output" in keys and not norm_output:
        # SpecForge then leaves out the norm before lm_head, which all other code computes.
        forms.append(replace(spec, scores_normed=False))
    partial = with_partial_rotary(layer_keys, decoder)
    if partial is not None:
        forms += [replace(form, decoder=partial) for form in forms]
    spec = replace(spec, other_forms=tuple(forms[1:]))
    _take(weights, spec, decoder)
    return Head(spec, weights.finish(), ids)


def _aux_layers(
    keys: Keys,
    nested: Keys,
    weights: Weights,
    target: TargetShape,
    layers: tuple[int, ...] | None,
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Return the layers that fc reads, and others that the file may mean.

    Both are empty for a head without fc.
    """
    if not nested.flag("use_aux_hidden_state", True):
        return (), ()
    count = aux_layer_count(weights, target)
    return choose_aux_layers(keys, count, target, _candidates(keys, nested, target), layers)


def _refuse_modelopt(nested: Keys) -> None:
    """Raise OutriderError for variants of ModelOpt that no published head uses."""
    for name, supported in _MODELOPT.items():
        if nested.flag(name, supported) is not supported:
            raise nested.wrong(name, f"must be {str(supported).lower()}; the rest is unsupported")
    if nested.integer("parallel_draft_step", 1) > 1:
        raise nested.wrong("parallel_draft_step", "must be 1; more heads are not supported")


def _candidates(keys: Keys, nested: Keys, target: TargetShape) -> list[tuple[int, ...]]:
    """Return the aux_layers that the file may mean, the likeliest first.

    At the top of the file, eagle_aux_hidden_state_layer_ids has auxiliary layers. In eagle_config,
    the same key has ids of layers.
    """
    count = target.layer_count
    default = (2, count // 2, count - 3)
    stated = keys.ids("eagle_aux_hidden_state_layer_ids") or nested.ids("layer_ids")
    of_layers = nested.ids("eagle_aux_hidden_state_layer_ids") or keys.ids("target_layer_ids")
    return possible_aux_layers(stated, of_layers, default)


def _take(weights: Weights, spec: HeadSpec, decoder: Decoder) -> None:
    hidden, width, count = decoder.hidden_size, spec.target.hidden_size, len(spec.aux_layers)
    if count:
        weights.take("fc.weight", hidden, count * width)
    if spec.join_bias:
        weights.take("fc.bias", hidden)
    if spec.feature_norms:
        for i in range(count):
            weights.take(f"fc_norm.{i}.weight", width)
    if spec.row_norm:
        weights.take("input_norm.weight", count * width)
    if spec.kind == "peagle":
        weights.take("mask_hidden", 1, 1, count * width)
    weights.take("layers.0.hidden_norm.weight", hidden)
    take_layers(weights, decoder, first_input=2 * hidden)
    weights.take("norm.weight", hidden)
