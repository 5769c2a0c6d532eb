"""A plain version of `outrider.lm.gpu.triton_attention.paged_attention`, as one operator."""

from __future__ import annotations

import torch

from outrider.lm.layout import KernelArguments
from outrider.lm.softmax import Softmax


@torch.library.custom_op("outrider_tests::paged_attention", mutates_args=())
def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    tree_starts: torch.Tensor,
    ancestors: torch.Tensor,
    max_seq_len: int,
    scale: float,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
    chunked: bool,
) -> torch.Tensor:
    narrow = (cu_seqlens_q, seq_lens, block_table, slots, positions, tree_starts)
    assert {tensor.dtype for tensor in narrow} == {torch.int32}
    assert ancestors.dtype is torch.int64
    # Rows that belong to no sequence hold arbitrary values.
    out = query.new_full((*query.shape[:2], values.shape[-1]), torch.nan)
    for i, count in enumerate(seq_lens.tolist()):
        begin, end = cu_seqlens_q[i : i + 2].tolist()
        assert count <= max_seq_len
        tree_start = int(tree_starts[i])
        assert slots[begin:end].tolist() == list(range(count - (end - begin), count))
        text = slots[begin:end] < tree_start
        assert slots[begin:end][text].equal(positions[begin:end][text])
        k, v = (cache[block_table[i].long()].flatten(0, 1)[:count] for cache in (keys, values))
        repeats = query.shape[1] // k.shape[1]
        k = k.repeat_interleave(repeats, 1)
        v = v.repeat_interleave(repeats, 1)
        seen, at = _seen(
            slots[begin:end], positions[begin:end], count, tree_start, ancestors[begin:end]
        )
        own = positions[begin:end, None]
        if chunked:
            seen &= own // window == at // window
        elif window:
            seen &= own - at < window
        scores = torch.einsum("qhd,khd->hqk", query[begin:end].float(), k.float()) * scale
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores.masked_fill(~seen, -torch.inf)
        if sinks is not None:
            scores = torch.cat(
                [scores, sinks.float()[:, None, None].expand_as(scores[..., :1])], -1
            )
        probs = scores.softmax(-1)[..., :count]
        out[begin:end] = torch.einsum("hqk,khd->qhd", probs, v.float()).to(out.dtype)
    return out


def _seen(
    slots: torch.Tensor,
    positions: torch.Tensor,
    count: int,
    tree_start: int,
    ancestors: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which keys the rows [Q] of a slice would see without a window, and their positions.

    Both are [Q, `count`]. A tree's rows may be from an earlier batch. A row's bitmask has a bit for
    each row of the tree that the row sees. The rows that it sees have consecutive positions.
    """
    at = torch.arange(count).repeat(len(slots), 1)
    seen = torch.arange(count) <= slots[:, None].cpu()
    seen[:, tree_start:] = False
    for row, slot in enumerate(slots.tolist()):
        if slot >= tree_start:
            word = int(ancestors[row]) % 2**64
            chain = [bit for bit in range(64) if word >> bit & 1]
            if len(chain) != int(positions[row]) - tree_start + 1:
                continue  # padding: it has no bitmask, so it would see too few keys
            keys = [tree_start + bit for bit in chain]
            seen[row, keys] = True
            at[row, keys] = torch.arange(tree_start, tree_start + len(chain))
    return seen.to(slots.device), at.to(slots.device)


def paged_attention(
    query_THD: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: KernelArguments,
    softmax: Softmax,
    *,
    max_seq_len: int,
) -> torch.Tensor:
    """Replace the kernel, on any device."""
    return _attend(
        query_THD,
        keys,
        values,
        batch.cu_seqlens_q,
        batch.seq_lens,
        batch.block_table,
        batch.slots,
        batch.positions,
        batch.tree_starts,
        batch.ancestors,
        max_seq_len,
        softmax.scale,
        softmax.window or 0,
        softmax.softcap or 0.0,
        softmax.sinks,
        softmax.chunked,
    )
