"""Attention over the paged cache, registered as an attention function of `transformers`.

Each attention module of a model carries the `LayerCache` of its layer. So no model code is copied,
and neither two models in one process nor two threads share any state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from outrider.lm.cpu.attention import PagedAttention
from outrider.lm.layout import AttentionGroup, BatchLayout, KernelArguments, StaticLayout
from outrider.lm.softmax import Softmax, counts_rows, tuned_by_position
from outrider.sampling.tensors import triton_works

NAME = "outrider_paged"
# Tiles of larger heads do not fit the shared memory of a multiprocessor.
_KERNEL_HEAD_SIZE = 256
_STATE = "outrider_layer_cache"


class UnsupportedAttention(NotImplementedError):
    """The paged attention lacks a part of a model's attention; the message names the part."""


class PagedKernel(Protocol):
    """Attention over the paged cache on a GPU. Each kernel has a module in `outrider.lm.gpu`."""

    def __call__(
        self,
        query_THD: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        batch: KernelArguments,
        softmax: Softmax,
        *,
        max_seq_len: int,
    ) -> torch.Tensor:
        """Attend for a packed batch over caches [pages, page size, KV heads, size].

        Return [T, H, value size]. Each token sees all tokens up to its own slot (of a tree's tokens
        only its ancestors and itself), within the window of `softmax`. No sequence has more than
        `max_seq_len` keys. The call must not read the batch on the host: a CUDA graph repeats the
        call for other batches of the same shapes.
        """
        ...


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The number of key/value heads and the head sizes of one layer, found by a trial forward."""

    heads: int
    key_size: int
    value_size: int


@dataclass(frozen=True, slots=True)
class _Store:
    """The tensors of one layer's cache, [pages, page_size, heads, size].

    `flat_keys` and `flat_values` are views of the same memory, [slots, heads, size].
    """

    keys: torch.Tensor
    values: torch.Tensor
    flat_keys: torch.Tensor
    flat_values: torch.Tensor

    def write(self, slot_mapping: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write a batch's keys and values [1, KV heads, T, D] to the slots [T]."""
        self.flat_keys.index_copy_(0, slot_mapping, key[0].transpose(0, 1))
        self.flat_values.index_copy_(0, slot_mapping, value[0].transpose(0, 1))


class LayerCache:
    """Keys and values of one layer, and the attention over them.

    Before `allocate`, a forward is a trial: it records the layer's shape, stores nothing, and
    attends within the single sequence of its batch.
    """

    def __init__(self) -> None:
        self.shape: LayerShape | None = None
        """The shape that the trial forward found; None before it."""
        self.softmax = Softmax(1.0)
        self.trial_calls = 0
        self.chunk: int | None = None
        """The number of positions in a chunk, if the layer's attention is chunked; else None."""
        self.layout: BatchLayout | StaticLayout | None = None
        self._store: _Store | None = None
        self._use_kernel = False
        self._max_seq_len = 0
        self.cpu_attention: PagedAttention | None = None

    def allocate(
        self,
        page_count: int,
        page_size: int,
        max_seq_len: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Create the cache for sequences of at most `max_seq_len` tokens.

        Raises RuntimeError if the trial forward did not reach this layer.
        """
        if self.shape is None:
            raise RuntimeError("allocate before the trial forward")
        size = (page_count, page_size, self.shape.heads)
        # The caches begin with zeros: a mask gives slots without a token the weight 0, but if such
        # a slot held NaN, 0 * NaN would be NaN.
        keys = torch.zeros(*size, self.shape.key_size, dtype=dtype, device=device)
        values = torch.zeros(*size, self.shape.value_size, dtype=dtype, device=device)
        self._store = _Store(keys, values, keys.flatten(0, 1), values.flatten(0, 1))
        self._max_seq_len = max_seq_len
        self._use_kernel = self.supports_kernel(device)
        if not self._use_kernel and PagedAttention.supports(keys, values, self.softmax):
            self.cpu_attention = PagedAttention(keys, values)

    @property
    def arrays(self) -> list[torch.Tensor]:
        """The keys and values as flattened arrays [slots, heads, size]; empty before `allocate`."""
        if self._store is None:
            return []
        return [self._store.flat_keys, self._store.flat_values]

    @property
    def page_count(self) -> int:
        """The number of pages; 0 before `allocate`."""
        if self._store is None:
            return 0
        return len(self._store.keys)

    def supports_kernel(self, device: torch.device) -> bool:
        """Return whether the GPU kernel can compute this layer on `device`."""
        if device.type != "cuda" or self.shape is None:
            return False
        if max(self.shape.key_size, self.shape.value_size) > _KERNEL_HEAD_SIZE:
            return False
        return triton_works(device)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        softmax: Softmax,
    ) -> torch.Tensor:
        """Store this batch's keys and values, then attend: map query [1, H, T, D] to [1, T, H, D].

        Raises RuntimeError if the layout is for the GPU kernel and this layer cannot use it.
        """
        layout = self.layout
        store = self._store
        if store is None or layout is None:
            return self._trial(query, key, value, softmax)
        query_THD = query[0].transpose(0, 1)
        if self._use_kernel:
            store.write(layout.slot_mapping, key, value)
            return self._by_kernel(store, layout.kernel, query_THD, softmax).unsqueeze(0)
        if isinstance(layout, StaticLayout):
            raise RuntimeError("the layout is for the GPU kernel, which this layer does not use")
        if self.cpu_attention is not None:
            out = self.cpu_attention.attend(layout.cpu_batch, query, key, value, softmax)
            return out.unsqueeze(0)
        store.write(layout.slot_mapping, key, value)
        groups = layout.groups
        if len(groups) == 1:
            return _attend_group(store, query_THD, groups[0], softmax).unsqueeze(0)
        out = query_THD.new_empty(*query_THD.shape[:2], store.values.shape[-1])
        for group in groups:
            rows = group.rows_BQ.flatten()
            if group.padded:
                rows = group.rows_BQ[group.is_real_BQ]
            out[rows] = _attend_group(store, query_THD, group, softmax)
        return out.unsqueeze(0)

    def attend_stored(self, query_THD: torch.Tensor, batch: KernelArguments) -> torch.Tensor:
        """Attend with the GPU kernel over keys and values that are stored; return [T, H, D].

        Raises RuntimeError before `allocate`, and if this layer does not use the kernel.
        """
        if self._store is None or not self._use_kernel:
            raise RuntimeError("the layer does not use the GPU kernel")
        return self._by_kernel(self._store, batch, query_THD, self.softmax)

    def _by_kernel(
        self,
        store: _Store,
        batch: KernelArguments,
        query_THD: torch.Tensor,
        softmax: Softmax,
    ) -> torch.Tensor:
        # This import is not at the top, because not every machine has Triton.
        from outrider.lm.gpu import triton_attention

        # A new kernel for some batches, such as batches without trees, would be chosen here.
        kernel: PagedKernel = triton_attention.paged_attention
        return kernel(
            query_THD,
            store.keys,
            store.values,
            batch,
            softmax,
            max_seq_len=self._max_seq_len,
        )

    def _trial(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, softmax: Softmax
    ) -> torch.Tensor:
        self.shape = LayerShape(key.shape[1], key.shape[-1], value.shape[-1])
        self.softmax = softmax
        self.trial_calls += 1
        out = scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=softmax.scale, enable_gqa=True
        )
        return out.transpose(1, 2)


def _attend_group(
    store: _Store,
    query_THD: torch.Tensor,
    group: AttentionGroup,
    softmax: Softmax,
) -> torch.Tensor:
    """Attend for one group over its pages; return [tokens, H, D] without padding."""
    batch, queries = group.shape
    heads, size = query_THD.shape[1:]
    if group.contiguous_slots is not None:
        key = _contiguous_view(store.flat_keys, group.contiguous_slots)
        value = _contiguous_view(store.flat_values, group.contiguous_slots)
    else:
        key = _gather(store.keys, group)
        value = _gather(store.values, group)
    # The query heads that share a key/value head are adjacent: treat them as further queries of
    # that key/value head instead of repeating its keys.
    kv_heads = key.shape[1]
    repeats = heads // kv_heads
    picked = query_THD if group.whole_batch else query_THD[group.rows_BQ]
    if queries == 1:
        folded = picked.reshape(batch, kv_heads, repeats, size)
    else:
        by_head = picked.reshape(batch, queries, kv_heads, repeats, size).transpose(1, 2)
        folded = by_head.flatten(2, 3)
    mask = group.mask(softmax, repeats, query_THD.dtype)
    if softmax.softcap is None and softmax.sinks is None:
        out = scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=softmax.scale)
    else:
        out = _by_scores(folded, key, value, mask, softmax)
    if queries > 1:
        out = out.view(batch, kv_heads, queries, repeats, -1).transpose(1, 2)
    if group.padded:
        return out.reshape(batch, queries, heads, -1)[group.is_real_BQ]
    return out.reshape(batch * queries, heads, -1)


def _contiguous_view(cache: torch.Tensor, slots: slice) -> torch.Tensor:
    """View adjacent slots of the flattened cache as [1, heads, keys, size]."""
    _, heads, size = cache.shape
    row = heads * size
    shape = (1, heads, slots.stop - slots.start, size)
    return cache.as_strided(shape, (0, size, row, 1), slots.start * row)


def _gather(cache: torch.Tensor, group: AttentionGroup) -> torch.Tensor:
    """Copy the group's keys or values from the cache; return [B, heads, keys, size]."""
    pages = cache.index_select(0, group.block_table_BP.flatten())
    gathered = pages.view(group.shape[0], -1, *pages.shape[2:])[:, : group.key_count]
    if group.unwritten_BK is not None:
        # Earlier sequences may have left NaN in these slots. A masked NaN still counts: 0 * NaN is
        # NaN.
        gathered.masked_fill_(group.unwritten_BK[:, :, None, None], 0)
    return gathered.transpose(1, 2)


def _by_scores(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    softmax: Softmax,
) -> torch.Tensor:
    """Attend by computing all scores, for soft caps or sinks: torch has no fused kernel for them.

    Where `group` query heads share a key/value head, row r of the query [B, KV heads, rows, D]
    belongs to query head r % group of that key/value head.
    """
    scores = query @ key.transpose(-1, -2) * softmax.scale
    if softmax.softcap is not None:
        scores = torch.tanh(scores / softmax.softcap) * softmax.softcap
    if mask is not None:
        scores = scores + mask
    if softmax.sinks is None:
        return scores.softmax(-1, dtype=torch.float32).to(value.dtype) @ value
    batch, kv_heads, rows, _ = scores.shape
    by_head = softmax.sinks.view(1, kv_heads, 1, -1)
    repeats = rows // by_head.shape[-1]
    sinks = by_head.expand(batch, -1, repeats, -1).reshape(batch, kv_heads, rows, 1)
    weights = torch.cat((scores.float(), sinks.float()), -1).softmax(-1)[..., :-1]
    return weights.to(value.dtype) @ value


def install(model: torch.nn.Module) -> dict[int, LayerCache]:
    """Give every module with a layer index the cache of that index; return the caches by index."""
    caches: dict[int, LayerCache] = {}
    for module in model.modules():
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int):
            attach(module, caches.setdefault(index, LayerCache()))
    return caches


def attach(layer: torch.nn.Module, cache: LayerCache) -> None:
    """Let those modules of a layer that have a layer index attend over this cache."""
    for module in layer.modules():
        if isinstance(getattr(module, "layer_idx", None), int):
            object.__setattr__(module, _STATE, cache)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """Attend for one layer; `transformers` calls this.

    Maps query [1, H, T, D], key and value [1, KV heads, T, D] to output [1, T, H, D]. Only the
    layout and the window decide which keys a token sees. Raises UnsupportedAttention for a mask,
    for a position bias, for attention to later tokens, and for a module without the number of its
    layer.
    """
    if attention_mask is not None:
        raise UnsupportedAttention("an attention mask of its own")
    if unused.get("position_bias") is not None:
        raise UnsupportedAttention("a position bias")
    is_causal = unused.get("is_causal")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise UnsupportedAttention("attention to later tokens")
    cache: LayerCache | None = getattr(module, _STATE, None)
    if cache is None:
        raise UnsupportedAttention("attention in modules without a layer_idx")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if cache.chunk is None:
        softmax = Softmax(scale, sliding_window, softcap, s_aux)
    else:
        softmax = Softmax(scale, cache.chunk, softcap, s_aux, chunked=True)
    if cache.layout is not None and counts_rows(module):
        query = tuned_by_position(module, query, cache.layout.positions)
    return cache.attend(query, key, value, softmax), None


AttentionInterface.register(NAME, paged_attention)
