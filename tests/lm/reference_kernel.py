"""A plain version of `outrider.lm.gpu.triton_attention.paged_attention`, as one operator."""

from __future__ import annotations

import torch

from outrider.lm.layout import KernelArguments


@torch.library.custom_op("outrider_tests::paged_attention", mutates_args=())
def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    positions: torch.Tensor,
    max_seqlen_q: int,
    max_seq_len: int,
    scale: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    assert {cu_seqlens_q.dtype, seq_lens.dtype, block_table.dtype} == {torch.int32}
    # Rows that belong to no sequence hold arbitrary values.
    out = query.new_full((*query.shape[:2], values.shape[-1]), torch.nan)
    for i, count in enumerate(seq_lens.tolist()):
        begin, end = cu_seqlens_q[i : i + 2].tolist()
        assert end - begin <= max_seqlen_q
        assert count <= max_seq_len
        assert positions[begin:end].tolist() == list(range(count - (end - begin), count))
        k, v = (cache[block_table[i].long()].flatten(0, 1)[:count] for cache in (keys, values))
        repeats = query.shape[1] // k.shape[1]
        k = k.repeat_interleave(repeats, 1)
        v = v.repeat_interleave(repeats, 1)
        distance = positions[begin:end, None] - torch.arange(count, device=query.device)
        seen = (distance >= 0) & ((distance < window) | (window == 0))
        scores = torch.einsum("qhd,khd->hqk", query[begin:end].float(), k.float()) * scale
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        probs = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out[begin:end] = torch.einsum("hqk,khd->qhd", probs, v.float()).to(out.dtype)
    return out


def paged_attention(
    query_THD: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: KernelArguments,
    *,
    max_seq_len: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Replace the kernel, on any device."""
    return _attend(
        query_THD,
        keys,
        values,
        batch.cu_seqlens_q,
        batch.seq_lens,
        batch.block_table,
        batch.positions,
        batch.max_seqlen_q,
        max_seq_len,
        scale,
        window or 0,
        softcap or 0.0,
    )
