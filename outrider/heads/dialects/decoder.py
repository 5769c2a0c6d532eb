"""The parts that several dialects share: decoder layers, vocabularies, and the target's layers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers.activations import ACT2FN

from outrider.heads.files import BY_VLLM, Keys, Weights
from outrider.heads.spec import Decoder, TargetShape, refusal

# The supported kinds of rotary embedding. Their frequencies do not depend on the text's length.
# Each kind is mapped to the names of the numbers that a config must give, and to the names of the
# numbers that it may give.
_ROPES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (
        ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        (),
    ),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "beta_fast", "beta_slow"),
    ),
}


_MOST_LAYERS = 1000


def read_decoder(
    keys: Keys, weights: Weights, *, qwen3: bool = False, by_transformers: bool = True
) -> Decoder:
    """Read the sizes of a head's layers, whose weights have names that begin with "layers.{i}.".

    With `qwen3`, a head whose model_type is qwen3 must have norms of queries and keys.
    `by_transformers` is True if the head's code takes its rotary embedding from `transformers`.
    Raises OutriderError(INVALID_VALUE).
    """
    model_type = keys.text("model_type", "")
    for name in weights.names:
        if "kv_a_proj" in name or ".experts." in name:
            why = f"{name} belongs to latent attention or to a mixture of experts; {BY_VLLM}"
            raise refusal(weights.path, why)
    hidden, heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    layers = keys.integer("num_hidden_layers", 1, most=_MOST_LAYERS)
    kv_heads = keys.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise keys.wrong("num_key_value_heads", f"must divide the {heads} attention heads")
    activation = keys.text("hidden_act", "silu")
    if activation not in ACT2FN:
        raise keys.wrong("hidden_act", f"is {activation!r}, which transformers does not have")
    rope = _rope(keys, by_transformers)
    size = keys.integer("head_dim", hidden // heads)
    first = "layers.0.self_attn."
    has_norms = f"{first}q_norm.weight" in weights or (qwen3 and model_type.startswith("qwen3"))
    has_bias = f"{first}q_proj.bias" in weights or keys.flag("attention_bias", False)
    return Decoder(
        hidden_size=hidden,
        intermediate_size=keys.integer("intermediate_size"),
        layer_count=layers,
        head_count=heads,
        kv_head_count=kv_heads,
        head_size=size,
        norm_eps=keys.number("rms_norm_eps", 1e-6),
        activation=activation,
        rope=rope,
        windows=_windows(keys, layers),
        projection_bias=has_bias,
        output_bias=f"{first}o_proj.bias" in weights,
        head_norms=has_norms,
        # Without a scaling, `transformers` rotates all channels, whatever the file says.
        rotary_size=(
            _rotary_size(keys, size) if by_transformers and rope["rope_type"] != "default" else None
        ),
    )


def _rope(keys: Keys, by_transformers: bool) -> dict[str, Any]:
    """Return the rotary embedding's numbers, which a config states in one of two sections."""
    stated = _rotary(keys)
    kind = stated.text("rope_type", stated.text("type", "default"))
    # A token of a text has one position number, so the multimodal sections change nothing.
    kind = "default" if kind == "mrope" else kind
    if kind not in _ROPES:
        raise keys.wrong("rope_parameters", f"has the type {kind!r}, which is not supported")
    needed, others = _ROPES[kind]
    numbers = {name: stated.number(name) for name in needed}
    numbers |= {name: stated.number(name) for name in others if name in stated}
    if kind == "yarn":
        numbers |= _yarn_scales(stated, numbers, by_transformers)
    theta = stated.number("rope_theta", keys.number("rope_theta", 10000.0))
    return {"rope_type": kind, "rope_theta": theta, **numbers}


def _rotary(keys: Keys) -> Keys:
    """Return the section about the rotary embedding."""
    return keys.section("rope_parameters" if keys.is_set("rope_parameters") else "rope_scaling")


def _rotary_size(keys: Keys, size: int) -> int | None:
    """Return how many channels of a head are rotated according to the file; None for all."""
    name = "partial_rotary_factor"
    part = _rotary(keys) if name in _rotary(keys) else keys
    count = size * part.number(name, 1.0)
    if count != int(count) or not 2 <= count <= size or count % 2:
        why = f"of {size} channels makes {count:g}, which is no even number from 2 to {size}"
        raise part.wrong(name, why)
    return None if count == size else int(count)


def with_partial_rotary(keys: Keys, decoder: Decoder) -> Decoder | None:
    """Return the decoder with as many rotated channels as the file states.

    Return None if the decoder already rotates that many. The code that trained the head rotated all
    channels, and vLLM rotates the stated number.
    """
    count = _rotary_size(keys, decoder.head_size)
    return None if count == decoder.rotary_size else replace(decoder, rotary_size=count)


def _yarn_scales(stated: Keys, numbers: Mapping[str, Any], by_transformers: bool) -> dict[str, Any]:
    """Return yarn's `truncate`, and what the file states about the factor for cosines and sines.

    Files state this factor by two numbers of DeepSeek's formula, each of which may be 0. If one is
    0, `transformers` leaves both out; SpecForge's EAGLE-3 computes with them.
    """
    found: dict[str, Any] = {"truncate": stated.flag("truncate", True)}
    if not ("mscale" in stated and "mscale_all_dim" in stated) or "attention_factor" in numbers:
        return found
    scales = [stated.number(name, zero=True) for name in ("mscale", "mscale_all_dim")]
    if not by_transformers:
        above, below = (0.1 * part * math.log(max(1.0, numbers["factor"])) + 1.0 for part in scales)
        found["attention_factor"] = above / below
    elif all(scales):
        found |= {"mscale": scales[0], "mscale_all_dim": scales[1]}
    return found


def _windows(keys: Keys, layers: int) -> tuple[int | None, ...]:
    kinds = keys.names("layer_types") or ["full_attention"] * layers
    if len(kinds) < layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise keys.wrong("layer_types", "must name full_attention or sliding_attention by layer")
    return tuple(
        keys.integer("sliding_window") if kind == "sliding_attention" else None
        for kind in kinds[:layers]
    )


def take_layers(
    weights: Weights, decoder: Decoder, *, first_input: int, first_norm: bool = True
) -> None:
    """Take the weights of all layers.

    The queries, keys and values of the first layer are made from `first_input` numbers. Without
    `first_norm`, the first layer has no input_layernorm.
    """
    hidden, size = decoder.hidden_size, decoder.head_size
    for i in range(decoder.layer_count):
        layer = f"layers.{i}."
        width = first_input if i == 0 else hidden
        if i > 0 or first_norm:
            weights.take(f"{layer}input_layernorm.weight", hidden)
        weights.take(f"{layer}post_attention_layernorm.weight", hidden)
        for name, heads in (("q", decoder.head_count), ("k", decoder.kv_head_count)):
            weights.take(f"{layer}self_attn.{name}_proj.weight", heads * size, width)
            if decoder.projection_bias:
                weights.take(f"{layer}self_attn.{name}_proj.bias", heads * size)
            if decoder.head_norms:
                weights.take(f"{layer}self_attn.{name}_norm.weight", size)
        weights.take(f"{layer}self_attn.v_proj.weight", decoder.kv_head_count * size, width)
        if decoder.projection_bias:
            weights.take(f"{layer}self_attn.v_proj.bias", decoder.kv_head_count * size)
        weights.take(f"{layer}self_attn.o_proj.weight", hidden, decoder.head_count * size)
        if decoder.output_bias:
            weights.take(f"{layer}self_attn.o_proj.bias", hidden)
        for name in ("gate_proj", "up_proj"):
            weights.take(f"{layer}mlp.{name}.weight", decoder.intermediate_size, hidden)
        weights.take(f"{layer}mlp.down_proj.weight", hidden, decoder.intermediate_size)


def take_vocabulary(
    keys: Keys, weights: Weights, target: TargetShape, hidden: int, draft_size: int | None
) -> tuple[int, torch.Tensor | None]:
    """Take embeddings, lm_head and the vocabulary map; return draft vocabulary size and target ids.

    `keys` has the head's own vocab_size and tie_word_embeddings. `draft_size` is the size of the
    draft vocabulary that the config states, None for the whole vocabulary. The returned target ids
    are None if the ids of the draft vocabulary are the target's ids.
    """
    whole = keys.integer("vocab_size", target.vocab_size)
    size = draft_size or whole
    if whole < target.vocab_size:
        raise other_vocabulary(keys, whole, target)
    own = weights.take_if("embed_tokens.weight", whole, hidden)
    if not own and whole != target.vocab_size:
        raise other_vocabulary(keys, whole, target)
    if not own and hidden != target.hidden_size:
        why = "the weights embed_tokens.weight are missing, and the target's have another shape"
        raise refusal(weights.path, why)
    ids = _target_ids(weights, size, whole, target.vocab_size)
    if ids is None and size == whole != target.vocab_size:
        raise other_vocabulary(keys, whole, target)
    if ids is None and size != target.vocab_size:
        why = f"d2t is missing, but its vocabulary of {size} is not the target's"
        raise refusal(weights.path, why)
    if not weights.take_if("lm_head.weight", size, hidden):
        if own and keys.flag("tie_word_embeddings", False) and size == whole:
            weights.taken["lm_head.weight"] = weights.taken["embed_tokens.weight"]
        elif ids is not None or hidden != target.hidden_size:
            why = "the weights lm_head.weight are missing, and the target's have another shape"
            raise refusal(weights.path, why)
    return size, ids


def other_vocabulary(keys: Keys, size: int, target: TargetShape) -> Exception:
    """Return the error for a head whose vocabulary has another size than its target's."""
    why = (
        f"is {size}, but the target has {target.vocab_size} tokens; name the target that the head"
        f" was made for"
    )
    return keys.wrong("vocab_size", why)


def _target_ids(weights: Weights, size: int, whole: int, vocab_size: int) -> torch.Tensor | None:
    """Convert a vocabulary map to target ids; in the file it has offsets: id = i + d2t[i].

    `whole` is the number of the head's embeddings. It may exceed the target's vocabulary.
    """
    offsets = weights.ids("d2t", size)
    members = weights.ids("t2d", whole)
    if offsets is None:
        if members is not None and int(members.sum()) != whole:
            raise refusal(weights.path, "it has t2d, but d2t is missing")
        return None
    if offsets.dtype is torch.bool:
        raise refusal(weights.path, "d2t is of the type bool")
    ids = offsets.long() + torch.arange(size)
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        why = (
            f"d2t leads to the ids {low} to {high}, outside the target's 0 to {vocab_size - 1};"
            f" name the target that the head was made for"
        )
        raise refusal(weights.path, why)
    distinct = len(set(ids.tolist()))
    if distinct != size:
        raise refusal(weights.path, f"d2t leads to {distinct} ids only, not to {size}")
    if members is not None:
        listed = members.bool().nonzero().flatten()
        if not torch.equal(listed, ids.sort().values):
            why = f"t2d lists {len(listed)} ids, which are not the {size} ids of d2t"
            raise refusal(weights.path, why)
    return ids


def aux_layer_count(weights: Weights, target: TargetShape) -> int:
    """Return how many auxiliary layers fc reads. Raises OutriderError if it is no whole number."""
    width = weights.width("fc.weight")
    if width % target.hidden_size:
        why = (
            f"fc.weight reads {width} numbers a token, which is no multiple of the target's"
            f" hidden size {target.hidden_size}"
        )
        raise refusal(weights.path, why)
    return width // target.hidden_size


def choose_aux_layers(
    keys: Keys,
    count: int,
    target: TargetShape,
    candidates: Sequence[tuple[int, ...]],
    chosen: tuple[int, ...] | None,
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Return the auxiliary layers that a file most likely means, and others that it may mean.

    `candidates` are in order of likelihood; `chosen` is the user's setting, which replaces them.
    Raises OutriderError if the first candidate does not fit `count` or the target.
    """
    ordered = [chosen] if chosen is not None else list(dict.fromkeys(candidates))
    for ids in ordered[:1]:
        if len(ids) != count:
            raise keys.wrong("layers", f"are {list(ids)}, but fc reads {count} of them")
        if len(set(ids)) != count:
            raise keys.wrong("layers", f"are {list(ids)}, which repeat; set the layers it reads")
        if not all(0 <= i <= target.layer_count for i in ids):
            layers = f"the auxiliary layers 0 to {target.layer_count}"
            why = f"are {list(ids)}, but the target has {layers}"
            raise keys.wrong("layers", why)
    fitting = [
        ids
        for ids in ordered
        if len(set(ids)) == len(ids) == count and all(0 <= i <= target.layer_count for i in ids)
    ]
    return fitting[0], tuple(fitting[1:])


def after(ids: tuple[int, ...]) -> tuple[int, ...]:
    """Return the auxiliary layers whose inputs are the outputs of the layers `ids`."""
    return tuple(i + 1 for i in ids)


def possible_aux_layers(
    stated: tuple[int, ...] | None, of_layers: tuple[int, ...] | None, default: tuple[int, ...]
) -> list[tuple[int, ...]]:
    """Return the auxiliary layers that the ids of a file may mean, the likeliest first.

    `stated` are auxiliary layers, but a head that was converted to that form often kept its ids of
    layers. `of_layers` are ids of layers; the output of each is the input of the next layer, whose
    number is the auxiliary layer's. A file without ids means `default`.
    """
    if stated:
        return [stated, after(stated), default]
    if of_layers:
        return [after(of_layers), of_layers, default]
    return [default]


def check_target_size(keys: Keys, target: TargetShape) -> None:
    """Raise OutriderError if the file states a hidden size that is not the target's."""
    size = keys.integer("target_hidden_size", target.hidden_size)
    if size != target.hidden_size:
        why = f"is {size}, but the target's hidden size is {target.hidden_size}"
        raise keys.wrong("target_hidden_size", why)


def mask_token(keys: Keys, most: int, *sections: Keys) -> int | None:
    """Return the token that stands for unknown tokens; each dialect has a key for it.

    `most` is the last token with an embedding. Raises OutriderError if the file names a token above
    `most`.
    """
    for part in (*sections, keys):
        for name in ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id"):
            if name in part:
                return part.integer(name, least=0, most=most)
    return None
