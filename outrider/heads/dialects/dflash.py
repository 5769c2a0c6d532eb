"""DFlash and DSpark: the files of z-lab, DeepSpec, SpecForge, ModelOpt and speculators."""

from __future__ import annotations

from dataclasses import replace

from outrider.heads.dialects.decoder import (
    after,
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
from outrider.heads.files import BY_VLLM, Keys, Weights
from outrider.heads.spec import Confidence, Decoder, Head, HeadSpec, Markov, TargetShape

_MARKOV: tuple[Markov, ...] = ("vanilla", "gated", "rnn")
_MOST_ROWS = 256
# ModelOpt's flat names for the tensors that other dialects put under markov_head and
# confidence_head.
_FLAT = {
    "markov_w1.weight": "markov_head.markov_w1.weight",
    "markov_w1": "markov_head.markov_w1.weight",
    "markov_w2.weight": "markov_head.markov_w2.weight",
    "gate_proj.weight": "markov_head.gate_proj.weight",
    "gate_proj.bias": "markov_head.gate_proj.bias",
    "joint_proj.weight": "markov_head.joint_proj.weight",
    "joint_proj.bias": "markov_head.joint_proj.bias",
    "confidence_proj.weight": "confidence_head.proj.weight",
    "confidence_proj.bias": "confidence_head.proj.bias",
}


def read_dflash(
    keys: Keys,
    weights: Weights,
    target: TargetShape,
    layers: tuple[int, ...] | None,
    *,
    is_dspark: bool,
) -> Head:
    """Bring a DFlash or DSpark head to the normal form. Raises OutriderError(INVALID_VALUE)."""
    by_speculators = "speculators_model_type" in keys
    weights.rename(_plain_name)
    weights.skip("verifier_norm.weight", "verifier_lm_head.weight")
    own = keys.section("dflash_config")
    _refuse_variants(keys, own)
    check_target_size(keys, target)
    layer_keys = keys.section("transformer_layer_config") if by_speculators else keys
    decoder = read_decoder(layer_keys, weights, qwen3=True)
    hidden = decoder.hidden_size
    stated = keys.integer("draft_vocab_size") if "draft_vocab_size" in keys else None
    size, ids = take_vocabulary(layer_keys, weights, target, hidden, stated)
    # MiMo's mask token has an embedding of its own, in place of the target's.
    has_row = weights.take_if("mask_embedding", hidden)
    last = layer_keys.integer("vocab_size", target.vocab_size) - 1
    token = None if has_row else mask_token(keys, last, own)
    if token is None and not has_row:
        raise keys.wrong("mask_token_id", "is missing, and so are the weights mask_embedding")
    count = aux_layer_count(weights, target)
    candidates = _candidates(keys, own, decoder, target)
    aux_layers, others = choose_aux_layers(keys, count, target, candidates, layers)
    weights.take("fc.weight", hidden, count * target.hidden_size)
    weights.take("hidden_norm.weight", hidden)
    weights.take("norm.weight", hidden)
    take_layers(weights, decoder, first_input=hidden)
    markov, rank = _take_markov(keys, own, weights, target, hidden, size, is_dspark)
    confidence: Confidence = "none"
    if is_dspark:
        confidence = _take_confidence(keys, own, weights, hidden, rank)
    # In DSpark's own files, by DeepSpec and SpecForge, the anchor predicts. A speculators file says
    # whether the anchor predicts.
    anchor = is_dspark and not by_speculators
    spec = HeadSpec(
        kind="dspark" if is_dspark else "dflash",
        target=target,
        draft_vocab_size=size,
        aux_layers=aux_layers,
        final_state=False,
        decoder=decoder,
        other_aux_layers=others,
        mask_token_id=token,
        block_size=(own if "block_size" in own else keys).integer(
            "block_size", least=2, most=_MOST_ROWS
        ),
        anchor_predicts=own.flag("sample_from_anchor", keys.flag("sample_from_anchor", anchor)),
        causal_layers=_causal(keys, own, decoder),
        window_from_anchor=by_speculators and any(decoder.windows),
        markov=markov,
        markov_rank=rank,
        confidence=confidence,
    )
    partial = with_partial_rotary(layer_keys, decoder)
    if partial is not None:
        spec = replace(spec, other_forms=(replace(spec, decoder=partial),))
    return Head(spec, weights.finish(), ids)


def _plain_name(name: str) -> str:
    """Return the usual name of a tensor; SpecForge's early files and ModelOpt's have others."""
    name = name.removeprefix("model.").removeprefix("logit_head.")
    return _FLAT.get(name, name)


def _refuse_variants(keys: Keys, own: Keys) -> None:
    """Raise OutriderError for variants whose computation is neither DFlash's nor DSpark's."""
    for part in (own, keys):
        projector = part.text("projector_type", "dflash")
        if projector not in ("dflash", "dspark"):
            raise part.wrong("projector_type", f"{projector!r} is not supported; {BY_VLLM}")
        for name in ("use_swa", "attention_sink_bias", "attention_value_scale", "conv_kernel_size"):
            if part.is_set(name):
                raise part.wrong(name, f"is not supported; {BY_VLLM}")


def _candidates(
    keys: Keys, own: Keys, decoder: Decoder, target: TargetShape
) -> list[tuple[int, ...]]:
    """Return the aux_layers that the file may mean, the likeliest first."""
    default = after(_even(target.layer_count, decoder.layer_count))
    stated = keys.ids("aux_hidden_state_layer_ids") or own.ids("layer_ids")
    of_layers = own.ids("target_layer_ids") or keys.ids("target_layer_ids")
    return possible_aux_layers(stated, of_layers, default)


def _even(target_layers: int, layers: int) -> tuple[int, ...]:
    """Return the layers that a file without ids means: evenly spread over the target's layers."""
    if layers == 1:
        return (target_layers // 2,)
    span = target_layers - 4
    return tuple(round(1 + i * span / (layers - 1)) for i in range(layers))


def _causal(keys: Keys, own: Keys, decoder: Decoder) -> tuple[bool, ...]:
    """Return for each layer whether a row sees, of its block, only itself and the rows before it.

    A file may state this for all layers. Where a file states nothing, its layers with a window are
    causal, as SpecForge and speculators train them. With speculators' key
    sliding_window_non_causal, rows see the whole block in these layers, as in all others.
    """
    for part, name in ((keys, "is_causal"), (own, "is_causal"), (own, "causal")):
        if name in part:
            return (part.flag(name, False),) * decoder.layer_count
    causal = not keys.flag("sliding_window_non_causal", False)
    return tuple(causal and window is not None for window in decoder.windows)


def _take_markov(
    keys: Keys,
    own: Keys,
    weights: Weights,
    target: TargetShape,
    hidden: int,
    size: int,
    is_dspark: bool,
) -> tuple[Markov, int]:
    """Take the weights that correct scores by the previous token; return their form and rank."""
    if not is_dspark:
        return "none", 0
    part = own if "markov_rank" in own else keys
    rank = part.integer("markov_rank", 0, least=0)
    if not rank:
        return "none", 0
    name = part.text("markov_head_type", "vanilla")
    form = next((known for known in _MARKOV if known == name), None)
    if form is None:
        raise part.wrong("markov_head_type", f"must be one of {', '.join(_MARKOV)}, not {name!r}")
    head = "markov_head."
    weights.take(f"{head}markov_w1.weight", target.vocab_size, rank)
    weights.take(f"{head}markov_w2.weight", size, rank)
    if form == "gated":
        weights.take(f"{head}gate_proj.weight", rank, hidden + rank)
        weights.take(f"{head}gate_proj.bias", rank)
    if form == "rnn":
        weights.take(f"{head}joint_proj.weight", 3 * rank, 2 * rank + hidden)
        weights.take(f"{head}joint_proj.bias", 3 * rank)
    return form, rank


def _take_confidence(keys: Keys, own: Keys, weights: Weights, hidden: int, rank: int) -> Confidence:
    """Take the weights that estimate acceptance; return the inputs of the estimate."""
    name = "confidence_head.proj."
    # DeepSpec's files have a key for the estimate, ModelOpt's files another key; some files have
    # only the weights.
    stated = [
        part.flag(key, False)
        for part in (own, keys)
        for key in ("enable_confidence_head", "use_confidence_head")
        if key in part
    ]
    wanted = any(stated) if stated else f"{name}weight" in weights
    if not wanted:
        return "none"
    part = own if "confidence_head_with_markov" in own else keys
    with_token = part.flag("confidence_head_with_markov", False)
    if with_token and not rank:
        raise part.wrong("confidence_head_with_markov", "needs a markov_rank above 0")
    weights.take(f"{name}weight", 1, hidden + (rank if with_token else 0))
    weights.take_if(f"{name}bias", 1)
    return "state and token" if with_token else "state"
