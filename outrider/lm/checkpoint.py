"""Reads checkpoints with `transformers`; refuses a checkpoint that lacks weights of its model."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.quantization_config import Mxfp4Config

from outrider.errors import OutriderError, Reason
from outrider.gguf import pretrained
from outrider.lm import support
from outrider.lm.devices import find_dtype
from outrider.tokenizer import check_model_folder

log = logging.getLogger(__name__)

# The maximum number of tensors that a refusal names.
_NAMED = 4
# Tables that old checkpoints store, although models compute them from the configuration.
_COMPUTED = re.compile(r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$")
_LAYER = re.compile(r"(?P<layer>.*?\.\d+)\.")
# The matrix with which a layer for multi-token prediction (MTP) joins embedding and hidden state.
# DeepSeek's and GLM's files number these layers after the model's own layers.
_MTP = ".eh_proj.weight"


def read_checkpoint(model: str, dtype: str, trust_remote_code: bool) -> torch.nn.Module:
    """Load the model of a directory, GGUF file or hub id to the CPU.

    Weights are read only from safetensors; a GGUF file is unpacked to safetensors first. Raises
    OutriderError: MODEL_NOT_FOUND, or INVALID_VALUE for a model that cannot be served. For example,
    a model cannot be served if the files lack a tensor (`transformers` would fill it with random
    numbers), or if nothing reads a tensor of the model's own parts (`transformers` would ignore
    it).
    """
    files = pretrained(model)
    check_model_folder(files)
    try:
        config = AutoConfig.from_pretrained(files, trust_remote_code=trust_remote_code)
        if config.is_encoder_decoder:
            raise support.unsupported(model, "it is an encoder-decoder")
        quantization = _dequantizing(model, config)
        loading: Any = AutoModelForCausalLM.from_pretrained(
            files,
            dtype=find_dtype(dtype),
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            **quantization,
            # With this, the report lists tensors of a wrong shape; without it, they raise an error.
            ignore_mismatched_sizes=True,
        )
    except (OSError, ValueError, SafetensorError) as cause:
        message = f"cannot load {model}: {' '.join(str(cause).split())}"
        raise OutriderError(Reason.MODEL_NOT_FOUND, message, "model") from cause
    except OutriderError:
        raise
    # The model's own code runs here, with a configuration that anybody may have written.
    except Exception as cause:
        why = f"{type(cause).__name__}: {' '.join(str(cause).split())}"
        raise support.unsupported(model, f"it cannot be loaded ({why})") from cause
    loaded: torch.nn.Module
    loaded, report = loading
    check_names(model, loaded, report)
    return loaded


def _dequantizing(model: str, config: Any) -> dict[str, Any]:
    """Return the arguments with which `transformers` dequantises MXFP4, the format of gpt-oss.

    The arguments are empty for weights that are not quantised. Raises OutriderError for weights
    that are quantised in another way.
    """
    quantization = getattr(config, "quantization_config", None)
    if quantization is None:
        return {}
    method = dict(quantization).get("quant_method", "by an unnamed method")
    if method != "mxfp4":
        why = f"its weights are quantised ({method}); --engine vllm may serve them"
        raise support.unsupported(model, why)
    log.info("%s: MXFP4 weights are dequantised, and computed in the model's own type", model)
    return {"quantization_config": Mxfp4Config(dequantize=True)}


def check_names(name: str, model: torch.nn.Module, report: Mapping[str, Any]) -> None:
    """Raise OutriderError unless the files have exactly the tensors of the text model.

    Parts beside the text model may have further tensors. `report` is what `transformers` reports
    about the load. It does not contain tied tensors, nor names that the model's class declares as
    ignorable.
    """
    shapes = [f"{key} {list(of)}, not {list(to)}" for key, of, to in report["mismatched_keys"]]
    unread = {each for each in report["unexpected_keys"] if _COMPUTED.search(each) is None}
    missing = report["missing_keys"]
    # If weights are missing, an unread tensor may be a missing weight under another name.
    beside = set() if missing else _beside(unread, model)
    found = {
        "its files lack": missing,
        "its files have other shapes of": shapes,
        "its configuration has no place for": unread - beside,
    }
    if why := [f"{what} {_some(names)}" for what, names in found.items() if names]:
        raise support.unsupported(name, "; ".join(why))
    if beside:
        log.info("%s: nothing reads %s", name, _some(beside))


def _some(names: Collection[str]) -> str:
    """Describe some tensors by their number and the first few names."""
    first = ", ".join(sorted(names)[:_NAMED])
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{len(names)} of its weights ({first}{more})"


def _beside(tensors: Iterable[str], model: torch.nn.Module) -> set[str]:
    """Return the unread tensors that belong to parts beside the text model.

    Such a part is a vision tower, a value head, or layers for multi-token prediction (MTP). It is a
    module of its own, in the module that holds the list of the decoder's layers, or in a module
    around it. MTP layers may also be numbered after the decoder's layers.
    """
    modules = dict(model.named_modules())
    lists = [path for path, module in modules.items() if isinstance(module, torch.nn.ModuleList)]
    around = {""}
    for path in lists:
        if not any(path.startswith(f"{outer}.") for outer in lists):
            around |= set(_parents(path))
    # A checkpoint of only the decoder has no prefix.
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    decoder = {path.removeprefix(prefix) for path in modules}
    known = modules.keys() | decoder
    drafting = {each.removesuffix(_MTP) for each in tensors if each.endswith(_MTP)} - known
    beside = set()
    for tensor in tensors:
        layer = _LAYER.match(tensor)
        outer = _parents(tensor)
        own = outer[0] not in known and next(path for path in outer if path in known) in around
        if own or (layer is not None and layer["layer"] in drafting):
            beside.add(tensor)
    return beside


def _parents(path: str) -> list[str]:
    """Return the modules around a module or tensor, from the innermost to "", the model itself."""
    parts = path.split(".")
    return [".".join(parts[:count]) for count in range(len(parts) - 1, -1, -1)]
