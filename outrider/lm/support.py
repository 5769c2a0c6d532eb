"""Checks whether a model can be served, by its configuration and a trial forward."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from outrider.errors import OutriderError, Reason
from outrider.lm.attention import LayerCache

_TRIAL_TOKENS = 4


def unsupported(model: str, why: str) -> OutriderError:
    """Return the INVALID_VALUE error for a model that cannot be served."""
    return OutriderError(Reason.INVALID_VALUE, f"{model} cannot be served: {why}", "model")


def context_length(name: str, config: Any) -> int:
    """Return the largest number of tokens in a sequence.

    Longrope picks its rotary frequencies by the longest position in a forward, so one long
    sequence would change the others packed with it. Such models are served up to the length at
    which the frequencies would switch. Raises OutriderError(INVALID_VALUE) if the configuration
    has no length.
    """
    length: int | None = getattr(config, "max_position_embeddings", None)
    if length is None:
        raise unsupported(name, "its configuration has no max_position_embeddings")
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [entry for entry in rope.values() if isinstance(entry, Mapping)]
    switches: list[int] = [
        entry["original_max_position_embeddings"]
        for entry in nested or [rope]
        if entry.get("rope_type") == "longrope"
    ]
    return min([length, *switches])


@torch.inference_mode()
def check_by_trial(model: Any, name: str, config: Any, layers: Mapping[int, LayerCache]) -> None:
    """Run a forward of a few tokens, in which each layer records its shape.

    Raises OutriderError(INVALID_VALUE) unless every layer attends through the paged attention,
    with the window that the configuration states.
    """
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise unsupported(name, "its forward takes no logits_to_keep")
    ids = torch.zeros(1, _TRIAL_TOKENS, dtype=torch.long, device=next(model.parameters()).device)
    try:
        model(input_ids=ids, use_cache=False)
    except NotImplementedError as cause:
        raise unsupported(name, f"it uses {cause}, which the paged attention cannot do") from cause
    _check_layers(name, config, layers)


def _check_layers(name: str, config: Any, layers: Mapping[int, LayerCache]) -> None:
    count: int = config.num_hidden_layers
    seen = sum(layer.shape is not None for layer in layers.values())
    if seen != count:
        why = f"{count - seen} of {count} layers do not attend through the attention interface"
        raise unsupported(name, why)
    windowed = getattr(config, "sliding_window", None) is not None
    default = "sliding_attention" if windowed else "full_attention"
    kinds = getattr(config, "layer_types", None) or [default] * count
    for index, kind in enumerate(kinds):
        known = kind in ("full_attention", "sliding_attention")
        # The paged attention gets no mask: a layer whose window exists only in the mask would
        # silently attend to too many keys.
        if not known or layers[index].windowed != (kind == "sliding_attention"):
            why = f"layer {index} is {kind} in a way that the paged attention cannot see"
            raise unsupported(name, why)
