"""A whole forward of Llama and its like in one call of `decoder.c`, in bfloat16 or float32.

The model of transformers stays: its modules say what the weights are, and a trial forward must agree with it. Models that are built
otherwise run as they did.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Mapping
from typing import Any

import torch

from outrider.lm.attention import LayerCache
from outrider.lm.cpu.attention import Batch, Layer
from outrider.lm.cpu.library import library, prefix
from outrider.lm.cpu.weights import JointLinear, LinearStruct, TiledLinear
from outrider.lm.layout import BatchLayout, SequenceSlice

log = logging.getLogger(__name__)

# What decoder.c computes. A list, since what others do besides may show only at lengths that no trial reaches.
_MODELS = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
# Kinds of rotary embedding whose frequencies are the same at every length.
_STEADY_ROTATIONS = ("default", "linear", "llama3", "yarn")
_LANES = 16
_TRIAL_TOKENS = 24
# Of the logits' standard deviation. Rounding to bfloat16 makes 0.008 to 0.014 of it; half a residual 0.06, another rotation 0.2 and
# more. Float32 makes less than a millionth.
_TRIAL_TOLERANCE = {torch.bfloat16: 0.04, torch.float32: 0.001}


class _DecoderLayer(ctypes.Structure):
    """`struct decoder_layer` in C."""

    _fields_ = (
        *((name, LinearStruct) for name in ("qkv", "o", "gate_up", "down")),
        *(
            (name, ctypes.c_void_p)
            for name in ("input_norm", "post_norm", "query_norm", "key_norm")
        ),
        ("cache", Layer),
    )


class _Decoder(ctypes.Structure):
    """`struct decoder` in C."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("layers", "embedding", "norm")),
        ("head", LinearStruct),
        ("frequencies", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("layer_count", "hidden", "intermediate", "pairs")),
        *((name, ctypes.c_float) for name in ("epsilon", "rotation_scale", "attention_scale")),
    )


class _Step(ctypes.Structure):
    """`struct step` in C."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("token_ids", "positions", "wanted")),
        ("wanted_count", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("scratch", "logits")),
    )


class CpuDecoder:
    """Runs forwards in place of a model's own. Not thread-safe."""

    def __init__(self, model: Any, caches: Mapping[int, LayerCache]) -> None:
        """Raises LookupError that says why it cannot do this model."""
        found, self._dtype = library(), next(model.parameters()).dtype
        if found is None or self._dtype not in _TRIAL_TOLERANCE:
            raise LookupError(f"nothing was compiled for {self._dtype}")
        if type(model).__name__ not in _MODELS or not type(model).__module__.startswith(
            "transformers."
        ):
            raise LookupError("it is none of those that are built like Llama")
        base = model.model
        # The library has but their addresses.
        self._kept: list[object] = [model]
        self._layers = (_DecoderLayer * len(base.layers))(
            *(self._layer(layer, caches[i]) for i, layer in enumerate(base.layers))
        )
        self._decoder = self._whole(model, base)
        self._vocab_size: int = self._decoder.head.out_features
        names = (prefix(self._dtype) + name for name in ("decode", "continue", "scratch"))
        self._run, self._go_on, self._room = (getattr(found, name) for name in names)
        self._run.argtypes = (
            ctypes.POINTER(_Decoder),
            ctypes.POINTER(Batch),
            ctypes.POINTER(_Step),
        )
        self._go_on.argtypes = (
            *self._run.argtypes,
            ctypes.c_int64,
            ctypes.c_int64,
            ctypes.c_void_p,
        )
        self._run.restype = self._go_on.restype = None
        self._room.argtypes, self._room.restype = (
            (ctypes.POINTER(_Decoder), ctypes.c_int64),
            ctypes.c_int64,
        )
        self._scratch = torch.empty(0, dtype=torch.uint8)

    @classmethod
    def of(cls, model: Any, caches: Mapping[int, LayerCache], page_size: int) -> CpuDecoder | None:
        """For a model whose weights have settled, if this can do what it does; pages 0 on are overwritten."""
        try:
            decoder = cls(model, caches)
        except LookupError as reason:
            log.debug("%s runs as transformers runs it: %s", type(model).__name__, reason)
            return None
        difference = decoder._difference(model, caches, page_size)
        # Written so that a NaN is no agreement.
        if not difference <= _TRIAL_TOLERANCE[decoder._dtype]:
            log.warning(
                "%s runs as transformers runs it: a trial differed by %.2f",
                type(model).__name__,
                difference,
            )
            return None
        return decoder

    def forward(self, layout: BatchLayout) -> torch.Tensor:
        """Float32 logits [R, V] of the layout's logit rows; keys and values go into the caches."""
        logits = torch.empty(layout.logit_rows.numel(), self._vocab_size)
        self._run(self._decoder, layout.paged_whole.pointer, self._step(layout, logits))
        return logits

    def continue_greedily(self, layout: BatchLayout, count: int, limit: int) -> torch.Tensor:
        """[count, B]: for each of B slices of one token the likeliest next one, the likeliest behind that, and so on.

        The keys and values of the slices' tokens and of all but the last that follow go into the caches, and there have to be pages
        for them. Tokens are below `limit`.
        """
        slice_count = layout.token_ids.numel()
        logits, tokens = (
            torch.empty(slice_count, self._vocab_size),
            torch.empty(count, slice_count, dtype=torch.int64),
        )
        limit = min(limit, self._vocab_size)
        self._go_on(
            self._decoder,
            layout.paged_whole.pointer,
            self._step(layout, logits),
            limit,
            count,
            tokens.data_ptr(),
        )
        return tokens

    def _step(self, layout: BatchLayout, logits: torch.Tensor) -> _Step:
        needed = self._room(self._decoder, layout.token_ids.numel())
        if self._scratch.numel() < needed:
            self._scratch = torch.empty(needed, dtype=torch.uint8)
        tensors = layout.token_ids, layout.positions, layout.logit_rows
        addresses = (tensor.data_ptr() for tensor in tensors)
        return _Step(
            *addresses, layout.logit_rows.numel(), self._scratch.data_ptr(), logits.data_ptr()
        )

    @torch.inference_mode()
    def _difference(self, model: Any, caches: Mapping[int, LayerCache], page_size: int) -> float:
        """Root mean square of what the two forwards' logits of some tokens differ by, over their standard deviation."""
        count = min(_TRIAL_TOKENS, page_size * next(iter(caches.values())).page_count)
        ids = [(i * i * 31 + 7) % self._vocab_size for i in range(count)]
        layout = BatchLayout(
            [SequenceSlice(ids, 0, list(range(-(-count // page_size))), count)],
            page_size,
            torch.device("cpu"),
        )
        for cache in caches.values():
            cache.layout = layout
        arguments = {
            "input_ids": layout.token_ids.unsqueeze(0),
            "position_ids": layout.positions.unsqueeze(0),
        }
        theirs = model(**arguments, use_cache=False).logits[0].float()
        return float(
            (self.forward(layout) - theirs).square().mean().sqrt() / theirs.std().clamp(min=1e-6)
        )

    def _layer(self, layer: Any, cache: LayerCache) -> _DecoderLayer:
        attention, mlp = layer.self_attn, layer.mlp
        if type(mlp.act_fn).__name__ not in ("SiLU", "SiLUActivation"):
            raise LookupError(f"its activation is {type(mlp.act_fn).__name__}")
        if cache.windowed or cache.paged is None:
            raise LookupError("a layer's attention is not what the paged kernel does")
        whole = Layer.from_buffer_copy(cache.paged.struct)
        whole.heads = attention.o_proj.in_features // whole.head_size
        norms = (
            layer.input_layernorm,
            layer.post_attention_layernorm,
            *(getattr(attention, name, None) for name in ("q_norm", "k_norm")),
        )
        return _DecoderLayer(
            self._joint(attention.q_proj),
            self._tiled(attention.o_proj),
            self._joint(mlp.gate_proj),
            self._tiled(mlp.down_proj),
            *(self._norm(norm) for norm in norms),
            whole,
        )

    def _norm(self, norm: Any) -> int | None:
        return None if norm is None else self._address(norm.weight, self._dtype)

    def _address(self, tensor: torch.Tensor, dtype: torch.dtype) -> int:
        if tensor.dtype is not dtype:
            raise LookupError(f"some of its weights are {tensor.dtype}")
        self._kept.append(tensor := tensor.detach().contiguous())
        return tensor.data_ptr()

    def _whole(self, model: Any, base: Any) -> _Decoder:
        rotation, attention = base.rotary_emb, base.layers[0].self_attn
        if getattr(rotation, "rope_type", "default") not in _STEADY_ROTATIONS:
            raise LookupError(f"its rotary embedding is of the kind {rotation.rope_type}")
        frequencies = rotation.inv_freq.float()
        layer = self._layers[0]
        if frequencies.numel() % _LANES:
            raise LookupError(
                f"its rotary embedding has {frequencies.numel()} frequencies, no multiple of {_LANES}"
            )
        return _Decoder(
            ctypes.addressof(self._layers),
            self._address(base.embed_tokens.weight, self._dtype),
            self._norm(base.norm),
            self._tiled(model.lm_head),
            self._address(frequencies, torch.float32),
            len(self._layers),
            base.embed_tokens.weight.shape[1],
            layer.down.in_features,
            frequencies.numel(),
            base.norm.variance_epsilon,
            getattr(rotation, "attention_scaling", 1.0),
            attention.scaling,
        )

    def _tiled(self, layer: Any) -> LinearStruct:
        if not isinstance(layer, TiledLinear) or layer.dtype is not self._dtype:
            raise LookupError(f"a layer's weight is not in tiles of {self._dtype}")
        return layer.struct

    def _joint(self, first: Any) -> LinearStruct:
        if not isinstance(first, JointLinear):
            raise LookupError("layers with the same input are not one")
        return self._tiled(first.joint.layer)
