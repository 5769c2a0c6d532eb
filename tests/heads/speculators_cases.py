"""The heads that `by_speculators/make_heads.py` builds: kind, layers and settings of the config.

This module loads nothing, so that tests can name the cases without the package speculators.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

HIDDEN, VOCAB, DRAFT_VOCAB, LAYERS = 64, 128, 80, 12
LENGTHS = [12, 13, 25, 40]
LENGTH = 48
STEPS, BLOCK, MASK, RANK = 4, 6, 7, 8
STATES = [2, 6, 9]


class Case(NamedTuple):
    """A head: the type of its layers and what differs from the defaults of `make_heads.py`."""

    kind: str
    layers: Mapping[str, Any] = MappingProxyType({})
    config: Mapping[str, Any] = MappingProxyType({})
    type: str = "llama"
    layer_count: int = 1


def _rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


_YARN: dict[str, Any] = {"factor": 32.0, "original_max_position_embeddings": 16}
_LLAMA3: dict[str, Any] = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_WINDOW: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 9}
_MIXED: dict[str, Any] = {**_WINDOW, "layer_types": ["sliding_attention", "full_attention"]}


def _blocks(**more: Any) -> dict[str, Any]:
    return {
        "block_size": BLOCK,
        "mask_token_id": MASK,
        "aux_hidden_state_layer_ids": STATES,
        **more,
    }


def _dspark(form: str, **more: Any) -> Case:
    config = _blocks(markov_head_type=form, markov_rank=RANK, **more)
    return Case("dspark", config=config, type="qwen3")


CASES = {
    "eagle3": Case("eagle3"),
    "eagle3-residual-not-normed": Case("eagle3", config={"norm_before_residual": False}),
    "eagle3-qwen3": Case("eagle3", type="qwen3"),
    "eagle3-two-layers": Case("eagle3", layer_count=2),
    "eagle3-five-states": Case(
        "eagle3", config={"eagle_aux_hidden_state_layer_ids": [1, 3, 5, 8, 12]}
    ),
    "eagle3-whole-vocabulary": Case("eagle3", config={"draft_vocab_size": VOCAB}),
    "eagle3-row-norm": Case("eagle3", config={"norm_before_fc": True}),
    "eagle3-norm-output": Case("eagle3", config={"norm_output": True}),
    "eagle3.1": Case("eagle3", config={"fc_norm": True, "norm_output": True}),
    "eagle3-bias": Case("eagle3", {"attention_bias": True}),
    "eagle3-window": Case(
        "eagle3", {**_WINDOW, "layer_types": ["sliding_attention"]}, type="qwen3"
    ),
    "eagle3-linear": Case("eagle3", _rope("linear", factor=4.0)),
    "eagle3-llama3": Case("eagle3", _rope("llama3", **_LLAMA3)),
    "eagle3-yarn": Case("eagle3", _rope("yarn", **_YARN)),
    "eagle3-yarn-not-truncated": Case("eagle3", _rope("yarn", truncate=False, **_YARN)),
    "eagle3-yarn-scales": Case("eagle3", _rope("yarn", mscale=0.7, mscale_all_dim=0.5, **_YARN)),
    "eagle3-yarn-a-scale-of-0": Case(
        "eagle3", _rope("yarn", mscale=0.7, mscale_all_dim=0.0, **_YARN)
    ),
    "eagle3-partial-rotary": Case("eagle3", _rope("default", partial_rotary_factor=0.5)),
    "eagle3-yarn-partial-rotary": Case("eagle3", _rope("yarn", partial_rotary_factor=0.5, **_YARN)),
    "peagle": Case("peagle", layer_count=2),
    "peagle-feature-norms": Case("peagle", config={"fc_norm": True}, layer_count=2),
    "peagle-qwen3": Case("peagle", type="qwen3", layer_count=2),
    "dflash": Case("dflash", config=_blocks(), type="qwen3", layer_count=2),
    "dflash-anchor": Case("dflash", config=_blocks(sample_from_anchor=True), type="qwen3"),
    "dflash-whole-vocabulary": Case(
        "dflash", config=_blocks(draft_vocab_size=VOCAB), type="qwen3", layer_count=2
    ),
    "dflash-window": Case("dflash", _MIXED, _blocks(), "qwen3", 2),
    "dflash-window-not-causal": Case(
        "dflash", _MIXED, _blocks(sliding_window_non_causal=True), "qwen3", 2
    ),
    **{
        f"dspark-{form}{name}": _dspark(form, sample_from_anchor=anchor)
        for form in ("vanilla", "gated", "rnn")
        for name, anchor in (("", True), ("-no-anchor", False))
    },
    "dspark-no-confidence": _dspark("vanilla", enable_confidence_head=False),
    "dspark-rank-0": Case(
        "dspark", config=_blocks(markov_rank=0, confidence_head_with_markov=False), type="qwen3"
    ),
}
