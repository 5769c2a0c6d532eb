"""Checks whether the runner is right for every causal type of `transformers`, with tiny models.

Run as a script, it writes the last section of docs/models.md.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from outrider.errors import OutriderError
from outrider.lm.cpu.weights import optimize_for_cpu
from outrider.lm.runner import ModelRunner, SequenceSlice

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
TYPES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
VOCAB_SIZE = 256
_MOST_PARAMETERS = 5_000_000

_BY_SIZE: dict[int, str] = {
    1: "n_group topk_group n_shared_experts bos_token_id",
    2: """num_key_value_heads swa_num_key_value_heads num_global_key_value_heads moe_topk moe_k
        num_experts_per_tok top_k_experts zero_expert_num index_n_heads index_topk_blocks
        linear_num_key_heads sliding_window_pattern eos_token_id""",
    4: """num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers
        num_decoder_layers num_encoder_layers num_attention_heads n_head n_heads num_heads
        encoder_attention_heads decoder_attention_heads num_encoder_attention_heads
        num_decoder_attention_heads attention_heads swa_num_attention_heads num_experts
        num_local_experts n_routed_experts moe_num_experts linear_num_value_heads
        linear_num_heads""",
    8: """state_size mamba_d_state mamba_n_heads mamba_num_heads ssm_state_size laurel_rank d_rel
        index_block_size""",
    16: """head_dim swa_head_dim global_head_dim dim_head kv_channels attention_head_dim
        kv_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim index_topk index_head_dim
        o_lora_rank rotary_dim mamba_d_head mamba_head_dim mamba_chunk_size chunk_size
        linear_key_head_dim linear_value_head_dim linear_head_dim hidden_size_per_layer_input
        block_multiple_of block_size rel_extent patch_size floor_scale""",
    24: """sliding_window sliding_window_size window_size attention_window_size
        attention_chunk_size local_attention_window_len""",
    32: """expert_ffn_hidden_size moe_intermediate_size shared_expert_intermediate_size
        shared_intermediate_size expert_intermediate_size q_lora_rank image_size""",
    64: """hidden_size d_model n_embd embedding_size emb_dim word_embed_proj_dim intermediate_size
        ffn_dim encoder_ffn_dim decoder_ffn_dim n_inner dff dim_ff ffn_hidden_size d_inner
        intermediate_size_mlp dense_intermediate_size lru_width cross_attention_hidden_size""",
    VOCAB_SIZE: """vocab_size unpadded_vocab_size vocab_size_per_layer_input
        max_position_embeddings n_positions n_ctx max_seq_len max_sequence_length""",
}
_SIZES = {name: size for size, names in _BY_SIZE.items() for name in names.split()}
_SIZES |= {"pad_token_id": 0, "sep_token_id": 3, "decoder_start_token_id": 1}
_ALTERNATING = ["sliding_attention", "full_attention"] * 2
_CONVOLUTIONS = ["conv", "full_attention"] * 2
_HYBRID = ["linear_attention", "hybrid"] * 2
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
# Settings that a type needs besides the sizes.
_OVERRIDES: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "layer_types": _ALTERNATING,
        "rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE},
    },
    "dbrx": {
        "attn_config": {"rope_theta": 10_000.0, "kv_n_heads": 2},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "falcon_h1": {"mamba_d_ssm": 128},
    "gemma3n_text": {
        "num_kv_shared_layers": 2,
        "layer_types": _ALTERNATING,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "lfm2": {"layer_types": _CONVOLUTIONS},
    "lfm2_moe": {"layer_types": _CONVOLUTIONS},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2},
    "roc_bert": {
        "pronunciation_embed_dim": 16,
        "pronunciation_vocab_size": 64,
        "shape_embed_dim": 16,
        "shape_vocab_size": 64,
    },
    "zamba": {"layers_block_type": _HYBRID, "n_mamba_heads": 2},
    "zamba2": {"layers_block_type": _HYBRID},
    "zaya": {"num_experts_per_tok": 1},
}


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """`kind` is equal, refused, wrong, or not tried; unless it is equal, `why` gives the reason."""

    kind: str
    why: str = ""


def _tiny_config(kind: Any, overrides: Mapping[str, Any]) -> Any:
    fields = {field.name for field in dataclasses.fields(kind)}
    values: dict[str, Any] = {name: size for name, size in _SIZES.items() if name in fields}
    if "kv_lora_rank" in fields and "num_key_value_heads" in fields:
        # Every head has keys of its own, which the model makes from the numbers of the small rank.
        values["num_key_value_heads"] = values["num_attention_heads"]
    for name, part in kind.sub_configs.items():
        is_text = not name.startswith(("vision", "audio"))
        if name in fields and is_text and dataclasses.is_dataclass(part):
            values[name] = _tiny_config(part, {}).to_dict()
    return kind(**{**values, **overrides})


def build(name: str) -> Any:
    """Return a random float32 model of a type, scaled so that wrong attention changes its logits.

    Raises an error of any type if no model of the type can have the sizes above.
    """
    config = _tiny_config(CONFIG_MAPPING[name], _OVERRIDES.get(name, {}))
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    if sum(parameter.numel() for parameter in empty.parameters()) > _MOST_PARAMETERS:
        raise ValueError("its parts beside the text model are large")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.ndim > 1 and "embed" not in path:
                parameter.mul_(4)
            elif parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


_CUTS = (13, 20, 1, 1, 1, 30, 1, 1, 5, 1, 1, 1, 24)
_PAGES = [5, 1, 7, 2, 9, 3, 4]
_TOLERANCE = 1e-3


@torch.inference_mode()
def judge(name: str) -> Verdict:
    """Build a model of a type and serve it.

    Compare the logits of 100 tokens with the logits that `transformers` gives without a cache.
    """
    try:
        model = build(name)
    except Exception as cause:  # noqa: BLE001
        # With unusual sizes, code of `transformers` may raise any exception.
        return Verdict("not tried", _in_one_line(cause))
    own = copy.deepcopy(model)
    optimize_for_cpu(model)
    try:
        runner = ModelRunner(model, name, page_count=16)
    except OutriderError as cause:
        return Verdict("refused", cause.message.removeprefix(f"{name} cannot be served: "))
    draw = torch.Generator().manual_seed(3)
    ids = torch.randint(3, VOCAB_SIZE, (1, sum(_CUTS)), generator=draw)
    expected = own(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0]
    found = []
    start = 0
    for count in _CUTS:
        part = ids[0, start : start + count].tolist()
        found.append(runner.forward([SequenceSlice(part, start, _PAGES, count)]).clone())
        start += count
    difference = (torch.cat(found) - expected).square().mean().sqrt() / expected.std()
    if float(difference) <= _TOLERANCE:
        return Verdict("equal")
    return Verdict("wrong", f"its logits differ by {float(difference):.2g} standard deviations")


def _in_one_line(cause: Exception) -> str:
    return " ".join(str(cause).split())[:120]


HEADING = "## Types of `transformers`\n"
_SECTION = (
    HEADING
    + """
Of the {count} causal types of `transformers` {version}, the native engine serves {equal} with the
logits of `transformers` itself, and refuses {refused} at the start. {untried} types were not tried,
because no tiny model of them can be made in a test. `python -m tests.lm.causal_types` writes this
section from random models of some 100,000 parameters, and `tests/lm/test_causal_types.py` holds it
true.

### Served

{served}

### Refused

| reason | types |
| --- | --- |
{reasons}

### Not tried

{not_tried}
"""
)


def section(verdicts: Mapping[str, Verdict]) -> str:
    """Return the last section of docs/models.md."""
    by_kind: dict[str, list[str]] = {"equal": [], "refused": [], "not tried": [], "wrong": []}
    for name, verdict in verdicts.items():
        by_kind[verdict.kind].append(name)
    reasons: dict[str, list[str]] = {}
    for name in by_kind["refused"]:
        reasons.setdefault(_cell(verdicts[name].why), []).append(name)
    return _SECTION.format(
        count=len(verdicts),
        version=re.sub(r"\.\d+$", "", transformers.__version__),
        equal=len(by_kind["equal"]),
        refused=len(by_kind["refused"]),
        untried=len(by_kind["not tried"]),
        served=", ".join(by_kind["equal"]),
        reasons="\n".join(f"| {why} | {', '.join(of)} |" for why, of in reasons.items()),
        not_tried=", ".join(by_kind["not tried"]),
    )


def _cell(reason: str) -> str:
    """Return a reason without the numbers of these tiny models, which mean nothing elsewhere."""
    reason = re.sub(r" by [\d.e-]+ standard deviations", "", reason)
    reason = re.sub(r"^\d+ of \d+ layers", "some layers", reason)
    reason = re.sub(r"^layer \d+", "a layer", reason)
    return reason.replace("|", "/")


def judge_all() -> dict[str, Verdict]:
    """Judge every type, without the warnings of `transformers`."""
    logging.disable(logging.WARNING)
    try:
        return {name: judge(name) for name in TYPES}
    finally:
        logging.disable(logging.NOTSET)


if __name__ == "__main__":
    by_hand, _, _ = PAGE.read_text().partition(HEADING)
    PAGE.write_text(by_hand + section(judge_all()))
