"""EAGLE-1 and EAGLE-2, which have the same files."""

from __future__ import annotations

from dataclasses import replace

from outrider.heads.dialects.decoder import (
    check_target_size,
    read_decoder,
    take_layers,
    take_vocabulary,
    with_partial_rotary,
)
from outrider.heads.files import Keys, Weights
from outrider.heads.spec import Head, HeadSpec, TargetShape


def read_eagle(keys: Keys, weights: Weights, target: TargetShape) -> Head:
    """Bring an EAGLE-1 or EAGLE-2 head to the normal form. Raises OutriderError(INVALID_VALUE)."""
    weights.rename(lambda name: name.removeprefix("model."))
    check_target_size(keys, target)
    decoder = read_decoder(keys, weights)
    hidden = decoder.hidden_size
    if hidden != target.hidden_size:
        raise keys.wrong("hidden_size", f"is {hidden}, but the target's is {target.hidden_size}")
    size, ids = take_vocabulary(keys, weights, target, hidden, None)
    weights.take("fc.weight", hidden, 2 * hidden)
    has_bias = keys.flag("bias", "fc.bias" in weights)
    if has_bias:
        weights.take("fc.bias", hidden)
    take_layers(weights, decoder, first_input=hidden, first_norm=False)
    spec = HeadSpec(
        kind="eagle",
        target=target,
        draft_vocab_size=size,
        aux_layers=(),
        final_state=True,
        decoder=decoder,
        join_bias=has_bias,
    )
    partial = with_partial_rotary(keys, decoder)
    if partial is not None:
        spec = replace(spec, other_forms=(replace(spec, decoder=partial),))
    return Head(spec, weights.finish(), ids)
