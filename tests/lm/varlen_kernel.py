"""`torch.nn.attention.varlen.varlen_attn` for a CPU, as its documentation has it: an operator of its own, as the real one is."""

from __future__ import annotations

import torch

from outrider.lm import attention


@torch.library.custom_op("outrider_tests::varlen", mutates_args=())
def _kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor,
    max_q: int,
    max_k: int,
    scale: float,
    left: int,
    right: int,
) -> torch.Tensor:
    assert query.is_contiguous()
    assert {cu_seq_q.dtype, seqused_k.dtype, block_table.dtype} == {torch.int32}
    assert key.shape[1] % attention.VARLEN_PAGE_SIZE == 0
    assert int(seqused_k.max()) <= max_k
    assert max_q > 1 or len(cu_seq_q) == len(query) + 1, "with one query each the kernel takes every row for a sequence"
    out = torch.full_like(query, torch.nan)  # rows that belong to no sequence are left as memory has them
    for i, used in enumerate(seqused_k.tolist()):
        begin, end = cu_seq_q[i : i + 2].tolist()
        assert end - begin <= max_q
        keys, values = (cache[block_table[i].long()].flatten(0, 1)[:used] for cache in (key, value))
        repeats = query.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(repeats, 1), values.repeat_interleave(repeats, 1)
        distance = torch.arange(used - (end - begin), used)[:, None] - torch.arange(used)
        seen = (distance >= -right) & ((distance <= left) | (left < 0))
        scores = torch.einsum("qhd,khd->hqk", query[begin:end], keys) * scale
        out[begin:end] = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), values)
    return out


def varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: None,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor,
) -> torch.Tensor:
    """The queries are the last of each sequence's tokens; pages behind `seqused_k` are not looked at."""
    assert cu_seq_k is None
    assert enable_gqa
    return _kernel(query, key, value, cu_seq_q, seqused_k, block_table, max_q, max_k, scale, *window_size)
