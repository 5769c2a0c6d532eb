"""Attention over the paged cache on a CPU by `paged_attention.c`, which reads pages where they lie; else they are gathered."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import Any

import torch

from outrider.lm.cpu.library import library

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
        *((name, ctypes.c_int64) for name in ("count", "slice_count")),
        *(
            (name, ctypes.c_void_p)
            for name in ("slots", "rows", "lengths", "starts", "page_at", "pages")
        ),
    )


class Rows(ctypes.Structure):
    """`struct rows` in C."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("head_stride", ctypes.c_int64),
        ("token_stride", ctypes.c_int64),
    )


class PagedBatch:
    """What the library is told of a batch, once a forward: where its tokens go, and the slices that it attends for.

    `slots` are places in the flattened cache, one a token; of each slice, `rows` has its first token's number in the batch,
    `lengths` its count of tokens, `starts` the position of the first, and `pages` its page numbers.
    """

    def __init__(
        self,
        slots: Sequence[int],
        rows: Sequence[int],
        lengths: Sequence[int],
        starts: Sequence[int],
        pages: Sequence[Sequence[int]],
    ) -> None:
        page_at, flat = [], array("q")
        for numbers in pages:
            page_at.append(len(flat))
            flat.extend(numbers)
        self._arrays = [
            *(array("q", numbers) for numbers in (slots, rows, lengths, starts, page_at)),
            flat,
        ]
        self._batch = Batch(
            len(slots), len(rows), *(numbers.buffer_info()[0] for numbers in self._arrays)
        )
        self.pointer = ctypes.byref(self._batch)


class PagedAttention:
    """One layer's attention, over caches [pages, page_size, kv_heads, head_size] in float32 or bfloat16."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        _, page_size, kv_heads, head_size = keys.shape
        # Kept, since the library has their addresses only.
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
    def takes(keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Whether the library is there and can do such a layer."""
        if (
            keys.device.type != "cpu"
            or keys.dtype not in (torch.float32, torch.bfloat16)
            or keys.shape != values.shape
        ):
            return False
        return keys.shape[-1] in _HEAD_SIZES and library() is not None

    def attend(
        self,
        batch: PagedBatch,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
    ) -> torch.Tensor:
        """Store all keys and values of the batch, [1, KV heads, T, D], and attend for its slices: query [1, H, T, D] to [T, H, D].

        Rows of tokens that are in none of the slices are left as they are in fresh memory.
        """
        _, heads, tokens, size = query.shape
        self.struct.heads = heads
        out = query.new_empty(tokens, heads, size)
        # Names keep what is made contiguous here until the call is over.
        query, key, value = (
            part if part.stride(3) == 1 else part.contiguous() for part in (query, key, value)
        )
        self._call(
            self._pointer,
            batch.pointer,
            _rows(query),
            _rows(key),
            _rows(value),
            out.data_ptr(),
            scaling,
            window or 0,
        )
        return out


def _rows(tensor: torch.Tensor) -> Rows:
    return Rows(tensor.data_ptr(), tensor.stride(1), tensor.stride(2))


def _function() -> Any:
    found = library()
    if found is None:
        raise RuntimeError("PagedAttention without its library; ask `takes` first")
    function = found.outrider_paged_attention
    function.argtypes = (
        ctypes.POINTER(Layer),
        ctypes.POINTER(Batch),
        *(Rows,) * 3,
        ctypes.c_void_p,
        ctypes.c_float,
        ctypes.c_int64,
    )
    function.restype = None
    return function
