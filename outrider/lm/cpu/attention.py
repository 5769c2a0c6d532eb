"""Attention over the paged cache on a CPU by `kernels/paged_attention.c`.

The C code reads pages in place; torch's operators need them gathered.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import Any

import torch

from outrider.lm.cpu.library import library
from outrider.lm.softmax import Softmax

_HEAD_SIZES = range(16, 257, 16)


class Layer(ctypes.Structure):
    """`struct layer` in C."""

    _fields_ = (
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        *(
            (name, ctypes.c_int64)
            for name in ("heads", "kv_heads", "head_size", "page_size", "is_bfloat16")
        ),
    )


class Batch(ctypes.Structure):
    """`struct batch` in C."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("token_count", "slice_count")),
        *(
            (name, ctypes.c_void_p)
            for name in ("slot_mapping", "first_rows", "lengths", "starts", "page_offsets", "pages")
        ),
        *((name, ctypes.c_void_p) for name in ("tree_starts", "ancestors")),
    )


class RowsStruct(ctypes.Structure):
    """`struct rows` in C."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("head_stride", ctypes.c_int64),
        ("token_stride", ctypes.c_int64),
    )


class PagedBatch:
    """One batch in the form that the C library reads, built once for each forward.

    `slot_mapping` has the slot of each token in the flattened cache. For each slice, `first_rows`
    has the row of its first token in the batch, `starts` the slot of this token in the sequence,
    `lengths` the slice's number of tokens, and `page_tables` the sequence's page numbers.

    In a batch with trees, `tree_starts` has for each slice the slot of its first tree token, or
    without a tree the slot after its last token. `ancestors` has a bitmask for each token of the
    batch; see `outrider.lm.layout.ancestors_by_token`.
    """

    def __init__(
        self,
        slot_mapping: Sequence[int],
        first_rows: Sequence[int],
        lengths: Sequence[int],
        starts: Sequence[int],
        page_tables: Sequence[Sequence[int]],
        tree_starts: Sequence[int] = (),
        ancestors: Sequence[int] = (),
    ) -> None:
        page_offsets = []
        pages = array("q")
        for table in page_tables:
            page_offsets.append(len(pages))
            pages.extend(table)
        per_token_or_slice = (slot_mapping, first_rows, lengths, starts, page_offsets)
        # The arrays are kept alive, because the C structure has only their addresses.
        self._arrays = [*(array("q", numbers) for numbers in per_token_or_slice), pages]
        if tree_starts:
            self._arrays += [array("q", tree_starts), array("Q", ancestors)]
        addresses = (numbers.buffer_info()[0] for numbers in self._arrays)
        # Without trees, the addresses of `tree_starts` and `ancestors` are null.
        self._batch = Batch(len(slot_mapping), len(first_rows), *addresses)
        self.pointer = ctypes.byref(self._batch)


class PagedAttention:
    """One layer's attention, over float32 or bfloat16 caches.

    The caches are [pages, page_size, kv_heads, head_size].
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        _, page_size, kv_heads, head_size = keys.shape
        # The caches are kept alive, because the C structure has only their addresses.
        self._caches = keys, values
        self.struct = Layer(
            keys.data_ptr(),
            values.data_ptr(),
            0,
            kv_heads,
            head_size,
            page_size,
            int(keys.dtype is torch.bfloat16),
        )
        self._pointer = ctypes.byref(self.struct)
        self._call = _function()

    @staticmethod
    def supports(keys: torch.Tensor, values: torch.Tensor, softmax: Softmax) -> bool:
        """True if the library was built and supports a layer with these caches and this softmax."""
        if softmax.softcap is not None:
            return False
        if keys.device.type != "cpu" or keys.shape != values.shape:
            return False
        if keys.dtype not in (torch.float32, torch.bfloat16):
            return False
        return keys.shape[-1] in _HEAD_SIZES and library() is not None

    def attend(
        self,
        batch: PagedBatch,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        softmax: Softmax,
    ) -> torch.Tensor:
        """Store all keys and values [1, KV heads, T, D] of the batch, and attend for its slices.

        Maps query [1, H, T, D] to output [T, H, D]. Output rows of tokens outside the slices are
        uninitialised.
        """
        _, heads, tokens, size = query.shape
        self.struct.heads = heads
        out = query.new_empty(tokens, heads, size)
        # The names keep the copies alive until the call returns.
        query, key, value = map(_with_contiguous_rows, (query, key, value))
        sinks = None if softmax.sinks is None else softmax.sinks.float().contiguous()
        self._call(
            self._pointer,
            batch.pointer,
            _rows(query),
            _rows(key),
            _rows(value),
            out.data_ptr(),
            softmax.scale,
            -(softmax.window or 0) if softmax.chunked else softmax.window or 0,
            None if sinks is None else sinks.data_ptr(),
        )
        return out


def _with_contiguous_rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(3) == 1 else tensor.contiguous()


def _rows(tensor: torch.Tensor) -> RowsStruct:
    return RowsStruct(tensor.data_ptr(), tensor.stride(1), tensor.stride(2))


def _function() -> Any:
    found = library()
    if found is None:
        raise RuntimeError("the C library was not built; check `PagedAttention.supports` first")
    function = found.outrider_paged_attention
    function.argtypes = (
        ctypes.POINTER(Layer),
        ctypes.POINTER(Batch),
        *(RowsStruct,) * 3,
        ctypes.c_void_p,
        ctypes.c_float,
        ctypes.c_int64,
        ctypes.c_void_p,
    )
    function.restype = None
    return function
