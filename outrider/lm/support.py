"""Which models can be served: what a configuration and a trial forward must show, and the errors that say why not."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from outrider.errors import OutriderError, Reason
from outrider.lm.attention import LayerCache

_TRIAL_TOKENS = 4


def unsupported(model: str, why: str) -> OutriderError:
    """INVALID_VALUE for a model that cannot be served."""
    return OutriderError(Reason.INVALID_VALUE, f"{model} cannot be served: {why}", "model")


def context_length(name: str, config: Any) -> int:
    """The largest number of tokens in a sequence; raises OutriderError(INVALID_VALUE) when the configuration does not tell.

    Longrope picks its frequencies by the longest position in a forward, so that one long sequence would change the others packed
    with it; such models are served up to the length where it would switch.
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
def try_out(model: Any, name: str, config: Any, layers: Mapping[int, LayerCache]) -> None:
    """A forward of a few tokens, which notes each layer's shape; raises OutriderError(INVALID_VALUE) unless every layer attends
    through the paged attention, with the masks that the configuration promises."""
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
        raise unsupported(
            name, f"{count - seen} of {count} layers do not attend through the attention interface"
        )
    default = (
        "full_attention" if getattr(config, "sliding_window", None) is None else "sliding_attention"
    )
    kinds = getattr(config, "layer_types", None) or [default] * count
    for index, kind in enumerate(kinds):
        # A model that leaves its window to the mask alone would silently see too much: the paged attention gets no mask.
        if kind not in ("full_attention", "sliding_attention") or layers[index].windowed != (
            kind == "sliding_attention"
        ):
            raise unsupported(
                name, f"layer {index} is {kind} in a way that the paged attention cannot see"
            )
