"""Reads a draft head's folder, whatever its dialect, into the normal form."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from outrider.errors import invalid
from outrider.gguf import pretrained
from outrider.heads.dialects.dflash import read_dflash
from outrider.heads.dialects.eagle import read_eagle
from outrider.heads.dialects.eagle3 import read_eagle3
from outrider.heads.dialects.glm import MODEL_TYPE, read_glm
from outrider.heads.dialects.medusa import read_medusa
from outrider.heads.dialects.mtp import COUNTS, is_mtp_weight, read_mtp, refuse_others
from outrider.heads.dialects.redrafter import MODEL_TYPE as REDRAFTER
from outrider.heads.dialects.redrafter import read_redrafter
from outrider.heads.files import BY_VLLM, Keys, Weights, open_config, open_weights
from outrider.heads.spec import Head, TargetShape, refusal
from outrider.tokenizer import check_model_folder

log = logging.getLogger(__name__)

# For each reader, the architectures in config.json that it understands.
_EAGLE3 = {
    "Eagle3Speculator",
    "Eagle3DraftModel",
    "Eagle3LlamaForCausalLM",
    "Eagle3Qwen3ForCausalLM",
    "Eagle3MiniMaxM2ForCausalLM",
    "Eagle3Qwen2_5vlForCausalLM",
    "Eagle3Qwen3vlForCausalLM",
    "LlamaForCausalLMEagle3",
    "PEagleDraftModel",
    "PEagleSpeculator",
    "PeagleLlamaForCausalLM",
    "PeagleQwen3ForCausalLM",
}
_EAGLE = {"EagleLlamaForCausalLM", "LlamaForCausalLMEagle", "EagleQwen2ForCausalLM"}
_DFLASH = {"DFlashDraftModel", "DFlashSpeculator"}
_DSPARK = {"Qwen3DSparkModel", "DSparkDraftModel", "DSparkSpeculator"}
_MEDUSA = {"MedusaModel", "MedusaForCausalLM"}
# Heads that are known but not supported: their layers, or how they choose tokens, differ too much
# from what the supported heads do.
_BY_OTHERS = {
    "Eagle3DeepseekV2ForCausalLM",
    "Eagle3DeepseekV3ForCausalLM",
    "DFlash2DraftModel",
    "DFlash2BeamDraftModel",
    "DFlash2Speculator",
    "DFlashLagunaForCausalLM",
    "DFlashMuseGlimmerAssistantModel",
    "DFlashQwen3XPressModel",
    "Qwen3XPressModel",
    "XPressSpeculator",
    "Gemma4DSparkModel",
    "K3DSparkModel",
    "DSparkMiniMaxDraftModel",
    "Qwen3OmniDSparkModel",
    "MuseSparkDSparkModel",
}
# Readers of heads that read only the target's final state.
_ON_FINAL_STATE = {"eagle": read_eagle, "medusa": read_medusa, "redrafter": read_redrafter}
_SPECULATORS = {"eagle3": "eagle3", "peagle": "eagle3", "dflash": "dflash", "dspark": "dspark"}


def read_target_config(target: str, trust_remote_code: bool = False) -> Any:
    """Return the `transformers` configuration of a target. Raises OutriderError(INVALID_VALUE).

    With `trust_remote_code` the target's own code may run, if it brings any.
    """
    try:
        # Without a value for trust_remote_code, `transformers` would ask on the terminal.
        return AutoConfig.from_pretrained(pretrained(target), trust_remote_code=trust_remote_code)
    # `transformers` raises errors of many types for a wrong configuration.
    except Exception as cause:
        why = " ".join(str(cause).split())
        if "trust_remote_code" in why:
            why = "it brings its own code, which runs only with --trust-remote-code"
        raise invalid("target", f"cannot read {target}: {why}") from cause


def read(path: str | Path, target_config: Any, layers: tuple[int, ...] | None = None) -> Head:
    """Read the head in the folder `path` for the target that `target_config` describes.

    `layers` names the auxiliary layers that the head reads, if the file is known to be wrong about
    them. Raises OutriderError(INVALID_VALUE) with a sentence that names the file, key or tensor at
    fault: nothing of a head is guessed or left out.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise refusal(folder, "it is no folder")
    check_model_folder(str(folder))
    target = TargetShape.of(target_config)
    keys = open_config(folder)
    stated = _stated_kind(keys)
    if stated == "mtp" and keys.text("model_type", "") == MODEL_TYPE:
        return _told(folder, read_glm(keys, folder, target))
    if stated == "mtp":
        refuse_others(keys)
        return _told(folder, read_mtp(keys, open_weights(folder, is_mtp_weight), target))
    weights = open_weights(folder)
    kind = stated or _kind_by_weights(keys, weights)
    if kind == "eagle3":
        head = read_eagle3(keys, weights, target, layers)
    elif kind in _ON_FINAL_STATE:
        head = _ON_FINAL_STATE[kind](keys, weights, target)
    else:
        head = read_dflash(keys, weights, target, layers, is_dspark=kind == "dspark")
    return _told(folder, head)


def with_reading(head: Head, number: int) -> Head:
    """Return the head with interpretation `number` (from 1) of its file. Raises OutriderError."""
    readings = head.spec.readings
    if number > len(readings):
        why = f"is {number}, but the head's file may mean {len(readings)} things at most"
        raise invalid("head_reading", why)
    return replace(head, spec=readings[number - 1])


def _told(folder: Path, head: Head) -> Head:
    """Log what was read; return the head."""
    spec = head.spec
    text = "head %s: %s on the target's auxiliary layers %s%s, %d of %d tokens"
    final = " and its final state" if spec.final_state else ""
    log.info(
        text,
        folder,
        spec.kind,
        list(spec.aux_layers),
        final,
        spec.draft_vocab_size,
        spec.vocab_size,
    )
    return head


def _stated_kind(keys: Keys) -> str | None:
    """Return the name of the reader for this config; None if only the weights can tell.

    Raises OutriderError for a head that no reader understands.
    """
    if "speculators_model_type" in keys:
        name = keys.text("speculators_model_type", "")
        if name not in _SPECULATORS:
            known = ", ".join(_SPECULATORS)
            why = f"is {name!r}; {known} are supported; {BY_VLLM}"
            raise keys.wrong("speculators_model_type", why)
        return _SPECULATORS[name]
    architectures = set(keys.names("architectures"))
    if strange := architectures & _BY_OTHERS:
        raise keys.wrong("architectures", f"names {min(strange)}, which is not read; {BY_VLLM}")
    if architectures & _DFLASH:
        own = keys.section("dflash_config").text("projector_type", "dflash")
        return "dspark" if own == "dspark" else "dflash"
    groups = {"eagle3": _EAGLE3, "eagle": _EAGLE, "dspark": _DSPARK, "medusa": _MEDUSA}
    for kind, names in groups.items():
        if architectures & names:
            return kind
    if "medusa_num_heads" in keys or keys.text("model_type", "") == "medusa":
        return "medusa"
    if keys.text("model_type", "") == REDRAFTER:
        return "redrafter"
    counts = [name for name in COUNTS if keys.is_set(name)]
    return "mtp" if counts or keys.section("text_config").is_set(COUNTS[1]) else None


def _kind_by_weights(keys: Keys, weights: Weights) -> str:
    """Find a head's reader by its weights: SafeAILab's files say only LlamaForCausalLM."""
    names = {name.removeprefix("model.") for name in weights.names}
    if (
        any(name.startswith("midlayer.") for name in names)
        or "layers.0.hidden_norm.weight" in names
    ):
        return "eagle3"
    if "hidden_norm.weight" in names and "fc.weight" in names:
        is_dspark = any("markov_w1" in name for name in names)
        return "dspark" if is_dspark else "dflash"
    if "fc.weight" in names and "layers.0.input_layernorm.weight" not in names:
        return "eagle"
    if any(
        name.startswith(("0.0.linear.", "medusa_head.0.", "blocks.0.layers.")) for name in names
    ):
        return "medusa"
    why = (
        f"is {keys.names('architectures')}, and neither that nor the names of its weights are those"
        f" of a head that can be read; to draft with a whole model, use the family model"
    )
    raise keys.wrong("architectures", why)
