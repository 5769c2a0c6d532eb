"""Checks from a model's configuration and trial forwards whether the model can be served."""

from __future__ import annotations

import inspect
import math
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from outrider.errors import OutriderError, Reason
from outrider.lm import attention, trial
from outrider.lm.attention import LayerCache, UnsupportedAttention

_SHAPE_TOKENS = 4
_CHUNKED = "chunked_attention"
_WINDOWED = ("sliding_attention", _CHUNKED)
_VLLM = "--engine vllm may serve it"
_HYBRID = "for state-space, linear-attention and hybrid models, use --engine vllm"
_LLAMA_LIKE = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
# The maximum number of characters of another library's error that a refusal repeats.
_CAUSE_CHARACTERS = 300


def unsupported(model: str, why: str) -> OutriderError:
    """Return the INVALID_VALUE error for a model that cannot be served."""
    return OutriderError(Reason.INVALID_VALUE, f"{model} cannot be served: {why}", "model")


def is_built_like_llama(model: Any) -> bool:
    """True if our forward for Llama's layers can replace the model's own forward.

    The difference between Llama and another type of model may show only at lengths that no trial
    reaches. So equal logits in a trial are not enough.
    """
    kind = type(model)
    return kind.__name__ in _LLAMA_LIKE and kind.__module__.startswith("transformers.")


@contextmanager
def refusals(name: str, what: str = "its forward") -> Iterator[None]:
    """Turn an error in the block into OutriderError(INVALID_VALUE), which says why `what` failed.

    A model's code and configuration are not ours, so an error there may be of any type. Two types
    of errors pass unchanged: OutriderError, and the failure of a device, which is not the model's
    fault.
    """
    try:
        yield
    except (OutriderError, torch.AcceleratorError):
        raise
    except UnsupportedAttention as cause:
        raise unsupported(name, f"it uses {cause}, which the paged attention cannot do") from cause
    except Exception as cause:
        text = " ".join(f"{type(cause).__name__}: {cause}".split())[:_CAUSE_CHARACTERS]
        if _lacks_mask(cause):
            raise unsupported(name, f"its forward needs an attention mask ({text})") from cause
        raise unsupported(name, f"{what} failed with {text}") from cause


def _lacks_mask(cause: Exception) -> bool:
    """Return whether an error was raised because a mask is None, in a line that names a mask."""
    lines = [frame.line or "" for frame in traceback.extract_tb(cause.__traceback__)[-2:]]
    return "NoneType" in str(cause) and any("mask" in line for line in lines)


def context_length(name: str, config: Any) -> int:
    """Return the largest number of tokens that a sequence may have.

    Longrope picks its rotary frequencies by the longest position in a forward, so one long sequence
    would change the other sequences of its batch. Such models are served up to the length at which
    the frequencies would switch. Raises OutriderError(INVALID_VALUE) if the configuration has no
    length.
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


def parallel_token_id(name: str, config: Any) -> int | None:
    """Return the id by which a PARD model (arXiv 2504.18583) guesses several tokens at once.

    Return None for other models. Raises OutriderError(INVALID_VALUE) for an id that is not in the
    vocabulary.
    """
    token = getattr(config, "pard_token", None)
    if token is None:
        return None
    if not isinstance(token, int) or not 0 <= token < config.vocab_size:
        raise unsupported(name, f"its pard_token {token} is not in [0, {config.vocab_size})")
    return token


@torch.inference_mode()
def find_shapes(model: Any, name: str, config: Any, layers: Mapping[int, LayerCache]) -> None:
    """Run a forward of a few tokens, in which each layer records its shape.

    Raises OutriderError(INVALID_VALUE) if the forward fails or takes no `logits_to_keep`. Every
    layer must attend exactly once through the paged attention, with the window that the
    configuration states; else the same error is raised.
    """
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise unsupported(name, "its forward takes no logits_to_keep")
    _cut_into_pieces(name, config, layers)
    ids = torch.zeros(1, _SHAPE_TOKENS, dtype=torch.long, device=next(model.parameters()).device)
    with refusals(name):
        model(input_ids=ids, use_cache=False)
    _check_layers(name, config, layers)
    _check_windows(name, config, layers)


def _cut_into_pieces(name: str, config: Any, layers: Mapping[int, LayerCache]) -> None:
    """Set the chunk size of layers with chunked attention; the model passes it only in a mask."""
    for index, kind in enumerate(getattr(config, "layer_types", None) or []):
        if kind != _CHUNKED or index not in layers:
            continue
        size = getattr(config, "attention_chunk_size", None)
        if not isinstance(size, int) or size < 1:
            raise unsupported(name, f"its attention_chunk_size is {size!r}, not a number above 0")
        layers[index].chunk = size


def _check_layers(name: str, config: Any, layers: Mapping[int, LayerCache]) -> None:
    count = max(config.num_hidden_layers, len(layers))
    seen = sum(layer.shape is not None for layer in layers.values())
    if seen != count:
        why = (
            f"{count - seen} of {count} layers do not attend through the attention interface; "
            f"{_HYBRID}"
        )
        raise unsupported(name, why)
    for index, layer in layers.items():
        if layer.trial_calls > 1:
            # The later call would overwrite the keys and values of the earlier call.
            raise unsupported(name, f"layer {index} attends {layer.trial_calls} times in a forward")


def _check_windows(name: str, config: Any, layers: Mapping[int, LayerCache]) -> None:
    stated = getattr(config, "sliding_window", None)
    default = "sliding_attention" if stated is not None else "full_attention"
    kinds = getattr(config, "layer_types", None) or [default] * config.num_hidden_layers
    for index, kind in enumerate(kinds):
        if kind not in ("full_attention", *_WINDOWED):
            why = f"layer {index} is {kind}, which the paged attention cannot do; {_VLLM}"
            raise unsupported(name, why)
        window = layers[index].softmax.window
        # The paged attention gets no mask: a layer whose window exists only in the mask would
        # silently attend to too many keys.
        if (window is not None) != (kind in _WINDOWED):
            why = f"layer {index} is {kind} in a way that the paged attention cannot see"
            raise unsupported(name, why)
        # A wrong window of at most LONGEST_WINDOW tokens shows in the logits of the trial.
        if kind != _CHUNKED and window and window > trial.LONGEST_WINDOW and window != stated:
            why = (
                f"layer {index} has a window of {window} tokens, its configuration one of {stated}"
            )
            raise unsupported(name, why)


def make_texts(
    name: str, vocab_size: int, length: int, layers: Mapping[int, LayerCache], page_size: int
) -> trial.Texts:
    """Return the texts of a model's trial; `length` is the model's context length.

    Raises OutriderError(INVALID_VALUE) if they do not fit the context.
    """
    longest = length - trial.SPARE_TOKENS
    if longest < trial.FEWEST_TOKENS:
        raise unsupported(name, f"its context of {length} tokens is too short")
    windows = [layer.softmax.window for layer in layers.values()]
    return trial.Texts(vocab_size, windows, longest=longest, page_size=page_size)


def own_logits(model: Any, name: str, vocab_size: int, texts: trial.Texts) -> trial.OwnLogits:
    """Compute the texts with `transformers`' own attention; set the paged attention afterwards.

    Raises OutriderError(INVALID_VALUE) if the model fails, or does not have `vocab_size` logits for
    each token.
    """
    with refusals(name):
        # Eager attention is each model's own code; sdpa leaves out soft caps, for example.
        model.set_attn_implementation("eager")
        logits = trial.compute(model, texts)
        if logits.shape[-1] != vocab_size:
            why = f"it has {logits.shape[-1]} logits a token, its configuration says {vocab_size}"
            raise unsupported(name, why)
        own = trial.OwnLogits(logits, _rounding(model, texts, logits))
        model.set_attn_implementation(attention.NAME)
    return own


def _rounding(model: Any, texts: trial.Texts, logits: torch.Tensor) -> float:
    """Return the median difference between `logits` and those with sdpa; infinite without sdpa."""
    try:
        model.set_attn_implementation("sdpa")
    except (ImportError, ValueError):
        return math.inf
    return float(trial.differences(logits, trial.compute(model, texts)).median())
