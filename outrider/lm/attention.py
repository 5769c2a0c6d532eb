"""Attention over the paged cache, as the one function that `transformers` models are told to call.

A model's attention module carries its `LayerCache`; so no model code is copied, two models can live in one process, and threads
share nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from outrider.lm.cpu.attention import PagedAttention
from outrider.lm.layout import BatchLayout, Group, KernelArguments, StaticLayout
from outrider.sampling.tensors import triton_works

NAME = "outrider_paged"
# Beyond it the kernel's tiles do not fit a multiprocessor's memory.
_KERNEL_HEAD_SIZE = 256
_STATE = "outrider_layer_cache"


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Key/value heads and head size of one layer, as seen in a trial forward."""

    heads: int
    key_size: int
    value_size: int


@dataclass(frozen=True, slots=True)
class _Store:
    """The tensors of one layer's cache; `flat_keys` and `flat_values` are the same memory, [pages * page_size, heads, size]."""

    keys: torch.Tensor
    values: torch.Tensor
    flat_keys: torch.Tensor
    flat_values: torch.Tensor

    def write(self, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Put a batch's keys and values, [1, KV heads, T, D], in the slots [T]."""
        self.flat_keys.index_copy_(0, slots, key[0].transpose(0, 1))
        self.flat_values.index_copy_(0, slots, value[0].transpose(0, 1))


class LayerCache:
    """Keys and values of one layer: [pages, page_size, heads, size] each, once `allocate` was called.

    Before that, a forward is a trial: it only notes the shape, and attends within the batch's single slice.
    """

    def __init__(self) -> None:
        self.shape: LayerShape | None = None
        self.windowed = False
        self._soft_capped = False
        self.layout: BatchLayout | StaticLayout | None = None
        self._store: _Store | None = None
        self._use_kernel = False
        self._most_keys = 0
        self.paged: PagedAttention | None = None

    def allocate(
        self,
        page_count: int,
        page_size: int,
        most_keys: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Make the cache, for texts of at most so many keys; raises RuntimeError when the trial forward never came here."""
        if self.shape is None:
            raise RuntimeError("allocate before the trial forward")
        size = (page_count, page_size, self.shape.heads)
        # Zeros, since a page that was never written is masked, but 0 * NaN would not be.
        keys = torch.zeros(*size, self.shape.key_size, dtype=dtype, device=device)
        values = torch.zeros(*size, self.shape.value_size, dtype=dtype, device=device)
        self._store = _Store(keys, values, keys.flatten(0, 1), values.flatten(0, 1))
        self._most_keys, self._use_kernel = most_keys, self.takes_kernel(device)
        if not self._use_kernel and not self._soft_capped and PagedAttention.takes(keys, values):
            self.paged = PagedAttention(keys, values)

    @property
    def page_count(self) -> int:
        """Of the allocated cache."""
        return 0 if self._store is None else len(self._store.keys)

    def takes_kernel(self, device: torch.device) -> bool:
        """Whether the GPU's kernel can do this layer."""
        if (
            device.type != "cuda"
            or self.shape is None
            or max(self.shape.key_size, self.shape.value_size) > _KERNEL_HEAD_SIZE
        ):
            return False
        return triton_works(device)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """Store this batch's keys and values, and attend: query [1, H, T, D] to output [1, T, H, D]."""
        layout, store = self.layout, self._store
        if store is None or layout is None:
            return self._trial(query, key, value, scaling, window, softcap)
        query_THD = query[0].transpose(0, 1)
        if self._use_kernel:
            store.write(layout.slots, key, value)
            return self._by_kernel(
                store, layout.kernel, query_THD, scaling, window, softcap
            ).unsqueeze(0)
        if isinstance(layout, StaticLayout):
            raise RuntimeError("a layout for the kernel, in a layer that does without")
        if self.paged is not None:
            out = self.paged.attend(layout.paged, query, key, value, scaling, window)
            groups = layout.long_groups
        else:
            store.write(layout.slots, key, value)
            groups = layout.groups
            if len(groups) == 1:
                return _attend_group(
                    store, query_THD, groups[0], scaling, window, softcap
                ).unsqueeze(0)
            out = query_THD.new_empty(*query_THD.shape[:2], store.values.shape[-1])
        for group in groups:
            rows = group.rows_BQ[group.real_BQ] if group.padded else group.rows_BQ.flatten()
            out[rows] = _attend_group(store, query_THD, group, scaling, window, softcap)
        return out.unsqueeze(0)

    def _by_kernel(
        self,
        store: _Store,
        batch: KernelArguments,
        query_THD: torch.Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        from outrider.lm.gpu import triton_attention  # here, since Triton is not there everywhere

        return triton_attention.paged_attention(
            query_THD,
            store.keys,
            store.values,
            batch,
            most_keys=self._most_keys,
            scale=scaling,
            window=window,
            softcap=softcap,
        )

    def _trial(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        self.shape = LayerShape(key.shape[1], key.shape[-1], value.shape[-1])
        self.windowed = window is not None
        self._soft_capped = softcap is not None
        out = scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2)


def _attend_group(
    store: _Store,
    query_THD: torch.Tensor,
    group: Group,
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Attention of one group's real tokens, [rows, H, D], over its pages, gathered."""
    batch, queries = group.shape
    heads, size = query_THD.shape[1:]
    if group.run is not None:
        key, value = _run_view(store.flat_keys, group.run), _run_view(store.flat_values, group.run)
    else:
        key, value = _gather(store.keys, group), _gather(store.values, group)
    # The query heads of one key/value head stand beside each other: fold them into the queries instead of repeating keys.
    shared = key.shape[1]
    repeats = heads // shared
    picked = query_THD if group.whole_batch else query_THD[group.rows_BQ]
    if queries == 1:
        folded = picked.reshape(batch, shared, repeats, size)
    else:
        folded = picked.reshape(batch, queries, shared, repeats, size).transpose(1, 2).flatten(2, 3)
    mask = group.mask(window, repeats, query_THD.dtype)
    if softcap is None:
        out = scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
    else:
        out = _soft_capped(folded, key, value, mask, scaling, softcap)
    if queries > 1:
        out = out.view(batch, shared, queries, repeats, -1).transpose(1, 2)
    if group.padded:
        return out.reshape(batch, queries, heads, -1)[group.real_BQ]
    return out.reshape(batch * queries, heads, -1)


def _run_view(cache: torch.Tensor, run: slice) -> torch.Tensor:
    """Keys or values that lie side by side in the flattened cache, [1, heads, keys, size]."""
    _, heads, size = cache.shape
    row = heads * size
    return cache.as_strided(
        (1, heads, run.stop - run.start, size), (0, size, row, 1), run.start * row
    )


def _gather(cache: torch.Tensor, group: Group) -> torch.Tensor:
    """The group's keys or values, [B, heads, keys, size]."""
    pages = cache.index_select(0, group.pages_BP.flatten())
    return pages.view(group.shape[0], -1, *pages.shape[2:])[:, : group.key_count].transpose(1, 2)


def _soft_capped(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    softcap: float,
) -> torch.Tensor:
    """Gemma 2's attention, whose scores are squashed to (-softcap, softcap), which no fused kernel here does."""
    scores = torch.tanh(query @ key.transpose(-1, -2) * (scaling / softcap)) * softcap
    scores = scores if mask is None else scores + mask
    return scores.softmax(-1, dtype=torch.float32).to(value.dtype) @ value


def install(model: torch.nn.Module) -> dict[int, LayerCache]:
    """Give every module that may attend its layer's cache, by layer number."""
    caches: dict[int, LayerCache] = {}
    for module in model.modules():
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int):
            object.__setattr__(module, _STATE, caches.setdefault(index, LayerCache()))
    return caches


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """The function that models call: query [1, H, T, D], key and value [1, KV heads, T, D] to output [1, T, H, D].

    Raises NotImplementedError for attention sinks, which change the softmax itself, and for a mask: who is seen follows from the
    positions and the window alone.
    """
    if attention_mask is not None:
        raise NotImplementedError("an attention mask of its own")
    if unused.get("s_aux") is not None:
        raise NotImplementedError("attention sinks")
    cache: LayerCache = getattr(module, _STATE)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return cache.attend(query, key, value, scale, sliding_window, softcap), None


AttentionInterface.register(NAME, paged_attention)
