"""A whole forward of a Llama-like model in one call of `kernels/decoder.c`, in bfloat16 or float32.

A model with int8 weights multiplies these in integers, and computes everything else in bfloat16.

The `transformers` model stays: its modules hold the weights. In a trial, the logits of this forward
must be about as near to the logits in float32 as the logits of the model's own forward are. A model
that fails this trial, or that the library does not support, keeps running its own forward.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from outrider.lm.attention import LayerCache
from outrider.lm.cpu.attention import Batch, Layer
from outrider.lm.cpu.library import library, prefix
from outrider.lm.cpu.weights import LinearStruct, TiledLinear
from outrider.lm.forward_check import worse_than_own
from outrider.lm.fused_linear import FusedLinearPart
from outrider.lm.layout import BatchLayout
from outrider.lm.support import is_built_like_llama

log = logging.getLogger(__name__)

# Kinds of rotary embedding whose frequencies do not depend on the length.
_FIXED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_LANES = 16


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
        *((name, ctypes.c_float) for name in ("epsilon", "rope_scale", "attention_scale")),
    )


class _Step(ctypes.Structure):
    """`struct step` in C."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("token_ids", "positions", "logits_indices")),
        ("logits_count", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("scratch", "logits")),
        ("logits_stride", ctypes.c_int64),
        ("states", ctypes.c_void_p),
        ("state_count", ctypes.c_int64),
        ("kept", ctypes.c_void_p),
    )


class CpuDecoder:
    """Runs forwards in C in place of a model's own. Not thread-safe."""

    def __init__(self, model: Any, caches: Mapping[int, LayerCache]) -> None:
        """Describe the model's weights and caches to the library.

        Raises LookupError with the reason if the library does not support the model.
        """
        found = library()
        self._dtype = next(model.parameters()).dtype
        self.numbers = getattr(getattr(model, "lm_head", None), "numbers", "")
        if found is None or self._dtype not in (torch.bfloat16, torch.float32):
            raise LookupError(f"no library was built for {self._dtype}")
        if not is_built_like_llama(model):
            raise LookupError("it is not one of the models that are built like Llama")
        base = model.model
        # `_kept` keeps objects alive, because the C structures have only their addresses.
        self._kept: list[object] = [model]
        self._layers = (_DecoderLayer * len(base.layers))(
            *(self._layer(layer, caches[i]) for i, layer in enumerate(base.layers))
        )
        self._decoder = self._whole(model, base)
        self._vocab_size: int = self._decoder.head.out_features
        self._declare_functions(found)
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def _declare_functions(self, found: ctypes.CDLL) -> None:
        names = (prefix(self.numbers) + name for name in ("decode", "continue", "scratch"))
        self._decode, self._continue, self._scratch_bytes = (getattr(found, name) for name in names)
        pointers = [ctypes.POINTER(struct) for struct in (_Decoder, Batch, _Step)]
        self._decode.argtypes = pointers
        self._decode.restype = None
        self._continue.argtypes = [*pointers, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]
        self._continue.restype = None
        self._scratch_bytes.argtypes = [ctypes.POINTER(_Decoder), ctypes.c_int64]
        self._scratch_bytes.restype = ctypes.c_int64

    @classmethod
    def of(cls, model: Any, caches: Mapping[int, LayerCache], page_size: int) -> CpuDecoder | None:
        """Return a decoder for a model that `optimize_for_cpu` prepared.

        Return None if the library does not support the model, or if in a trial the decoder is too
        far from the logits in float32 (see `worse_than_own`). The trial overwrites the pages from 0
        on.
        """
        name = type(model).__name__
        try:
            decoder = cls(model, caches)
        except LookupError as reason:
            log.debug("%s runs its own forward: %s", name, reason)
            return None
        why = worse_than_own(model, caches, page_size, lambda layout: decoder.forward(layout)[0])
        if why is not None:
            log.warning("%s runs its own forward: the C decoder's trial was %s", name, why)
            return None
        return decoder

    def forward(
        self, layout: BatchLayout, states: Sequence[int] = ()
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a forward of the layout's tokens, and write their keys and values to the caches.

        Return float32 logits [R, V] for the layout's `logits_indices`, and the hidden states
        [states, T, H] of all its tokens; `outrider.lm.hidden_states` explains `states`.
        """
        # Each dtype is given: while another thread loads a model, torch's default dtype may differ.
        shape_RV = layout.logits_indices.numel(), self._vocab_size
        logits = torch.empty(shape_RV, dtype=torch.float32)
        step = self._step(layout, logits)
        shape = (len(states), layout.token_ids.numel(), self._decoder.hidden)
        kept = torch.empty(shape, dtype=self._dtype)
        wanted = torch.tensor(states, dtype=torch.int64)
        step.states, step.state_count, step.kept = wanted.data_ptr(), len(states), kept.data_ptr()
        self._decode(self._decoder, layout.cpu_batch.pointer, step)
        return logits, kept

    def continue_greedily(
        self, layout: BatchLayout, count: int, limit: int, *, keep_logits: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Decode `count` tokens greedily for each of B one-token slices; return [count, B].

        Considers token ids below `limit` only. Writes to the caches the keys and values of the
        slices' tokens and of all new tokens but the last; the caller provides pages for them. Also
        returns the float32 logits of each forward, [count, B, V], or with `keep_logits` False the
        logits of the last forward, [1, B, V].
        """
        slice_count = layout.token_ids.numel()
        shape_KBV = count if keep_logits else 1, slice_count, self._vocab_size
        logits = torch.empty(shape_KBV, dtype=torch.float32)
        tokens = torch.empty(count, slice_count, dtype=torch.int64)
        step = self._step(layout, logits)
        step.logits_stride = logits.stride(0) if keep_logits else 0
        limit = min(limit, self._vocab_size)
        batch = layout.cpu_batch.pointer
        self._continue(self._decoder, batch, step, limit, count, tokens.data_ptr())
        return tokens, logits

    def _step(self, layout: BatchLayout, logits: torch.Tensor) -> _Step:
        needed = self._scratch_bytes(self._decoder, layout.token_ids.numel())
        if self._scratch.numel() < needed:
            self._scratch = torch.empty(needed, dtype=torch.uint8)
        return _Step(
            layout.token_ids.data_ptr(),
            layout.positions.data_ptr(),
            layout.logits_indices.data_ptr(),
            layout.logits_indices.numel(),
            self._scratch.data_ptr(),
            logits.data_ptr(),
        )

    def _layer(self, layer: Any, cache: LayerCache) -> _DecoderLayer:
        attention = layer.self_attn
        mlp = layer.mlp
        if type(mlp.act_fn).__name__ not in ("SiLU", "SiLUActivation"):
            raise LookupError(f"its activation is {type(mlp.act_fn).__name__}")
        if cache.cpu_attention is None:
            raise LookupError("the C attention does not support one of its layers")
        if cache.softmax.window is not None or cache.softmax.sinks is not None:
            raise LookupError("one of its layers has a window or sinks")
        cache_struct = Layer.from_buffer_copy(cache.cpu_attention.struct)
        cache_struct.heads = attention.o_proj.in_features // cache_struct.head_size
        norms = (
            layer.input_layernorm,
            layer.post_attention_layernorm,
            *(getattr(attention, name, None) for name in ("q_norm", "k_norm")),
        )
        return _DecoderLayer(
            self._fused(attention.q_proj),
            self._tiled(attention.o_proj),
            self._fused(mlp.gate_proj),
            self._tiled(mlp.down_proj),
            *(self._norm(norm) for norm in norms),
            cache_struct,
        )

    def _norm(self, norm: Any) -> int | None:
        return None if norm is None else self._address(norm.weight, self._dtype)

    def _address(self, tensor: torch.Tensor, dtype: torch.dtype) -> int:
        if tensor.dtype is not dtype:
            raise LookupError(f"some of its weights are {tensor.dtype}")
        tensor = tensor.detach().contiguous()
        self._kept.append(tensor)
        return tensor.data_ptr()

    def _whole(self, model: Any, base: Any) -> _Decoder:
        rope = base.rotary_emb
        if getattr(rope, "rope_type", "default") not in _FIXED_ROPE_TYPES:
            raise LookupError(f"its rotary embedding has type {rope.rope_type}")
        frequencies = rope.inv_freq.float()
        count = frequencies.numel()
        if count % _LANES:
            raise LookupError(f"it has {count} rotary frequencies, not a multiple of {_LANES}")
        return _Decoder(
            ctypes.addressof(self._layers),
            self._address(base.embed_tokens.weight, self._dtype),
            self._norm(base.norm),
            self._tiled(model.lm_head),
            self._address(frequencies, torch.float32),
            len(self._layers),
            base.embed_tokens.weight.shape[1],
            self._layers[0].down.in_features,
            count,
            base.norm.variance_epsilon,
            getattr(rope, "attention_scaling", 1.0),
            base.layers[0].self_attn.scaling,
        )

    def _tiled(self, layer: Any) -> LinearStruct:
        is_tiled = isinstance(layer, TiledLinear) and layer.dtype is self._dtype
        if not is_tiled or layer.numbers != self.numbers:
            raise LookupError(f"a layer's weight is not in tiles of {self._dtype}")
        struct: LinearStruct = layer.struct
        return struct

    def _fused(self, first: Any) -> LinearStruct:
        if not isinstance(first, FusedLinearPart):
            raise LookupError("layers that share an input are not fused")
        return self._tiled(first.fused.layer)
