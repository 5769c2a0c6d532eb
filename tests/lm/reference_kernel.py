"""What `outrider.lm.gpu.triton_attention.paged_attention` computes, written plainly, as one operator."""

from __future__ import annotations

import torch

from outrider.lm.layout import KernelArguments


@torch.library.custom_op("outrider_tests::paged_attention", mutates_args=())
def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    ends: torch.Tensor,
    key_counts: torch.Tensor,
    block_table: torch.Tensor,
    positions: torch.Tensor,
    longest: int,
    most_keys: int,
    scale: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    assert {ends.dtype, key_counts.dtype, block_table.dtype} == {torch.int32}
    out = query.new_full(
        (*query.shape[:2], values.shape[-1]), torch.nan
    )  # rows in no sequence are left as memory has them
    for i, count in enumerate(key_counts.tolist()):
        begin, end = ends[i : i + 2].tolist()
        assert end - begin <= longest
        assert count <= most_keys
        assert positions[begin:end].tolist() == list(range(count - (end - begin), count))
        k, v = (cache[block_table[i].long()].flatten(0, 1)[:count] for cache in (keys, values))
        repeats = query.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        distance = positions[begin:end, None] - torch.arange(count, device=query.device)
        seen = (distance >= 0) & ((distance < window) | (window == 0))
        scores = torch.einsum("qhd,khd->hqk", query[begin:end].float(), k.float()) * scale
        scores = torch.tanh(scores / softcap) * softcap if softcap else scores
        probs = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out[begin:end] = torch.einsum("hqk,khd->qhd", probs, v.float()).to(out.dtype)
    return out


def paged_attention(
    query_THD: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: KernelArguments,
    *,
    most_keys: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """In place of the kernel, on any device."""
    arguments = batch.ends, batch.key_counts, batch.block_table, batch.positions, batch.longest
    return _attend(
        query_THD, keys, values, *arguments, most_keys, scale, window or 0, softcap or 0.0
    )
