"""Attention over the paged cache on a GPU, by a kernel that reads pages where they lie: decoding, verification and prompts alike.

Softmax in one pass over the keys (FlashAttention-2, Dao, arXiv 2307.08691). A slice's tokens and the query heads that share a
key/value head are the rows of one tile, so that keys are read once for all of them; long texts are split over their keys and the
parts put together afterwards (Flash-Decoding, Dao et al. 2023). Where parts begin depends on positions alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from outrider.lm.layout import KernelArguments

# Query rows of a tile; 16 is what the tensor cores take at least.
_ROWS = (16, 32, 64)
# Bytes of a tile of keys: with them three tiles on their way fit the 99 KiB that a multiprocessor of Ada has.
_TILE_BYTES = 2**14
# A text is split into parts of at least so many keys, and the longest one into so many parts.
_PART = 1024
_PARTS = 16


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _scores(  # type: ignore[no-untyped-def]  # pointers and numbers of the kernel's own language
    q,
    k,
    at,
    position,
    scale,
    window,
    softcap,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Of rows and keys; -inf where a row does not see a key."""
    scores = tl.dot(q, k, input_precision="ieee" if EXACT else "tf32") * scale
    if CAPPED:
        # tanh, which the language lacks, by way of exp.
        scores = softcap * (1 - 2 / (1 + tl.exp(2 * scores / softcap)))
    seen = at[None, :] <= position[:, None]
    if WINDOWED:
        seen = seen & (at[None, :] > position[:, None] - window)
    return tl.where(seen, scores, float("-inf"))


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _fold(scores, v, maximum, total, sum_of_values, EXACT: tl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """What further keys make of each row's highest score, sum of weights and sum of weighted values."""
    highest = tl.maximum(maximum, tl.max(scores, 1))
    # A row that sees none of these keys has no highest score yet.
    base = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp(scores - base[:, None])
    kept = tl.exp(maximum - base)
    product = tl.dot(weights.to(v.dtype), v, input_precision="ieee" if EXACT else "tf32")
    return highest, total * kept + tl.sum(weights, 1), sum_of_values * kept[:, None] + product


# What varies from step to step must not have a kernel compiled anew.
@triton.jit(  # type: ignore[untyped-decorator]  # Triton has no types
    do_not_specialize=["width", "token_count"],
    do_not_specialize_on_alignment=["ends", "key_counts", "table"],
)
def _attend(  # type: ignore[no-untyped-def]  # pointers and numbers of the kernel's own language
    query, keys, values, out, sums, ends, key_counts, table, width, token_count, scale, window, softcap,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, KEY_LANES: tl.constexpr,
    VALUE_LANES: tl.constexpr, PAGE_SIZE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PART: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """One tile of rows of one sequence and key/value head, over the keys of one part.

    `out` is [parts, T, heads, value size], each part normalised for itself; `sums` has the logarithms of what they were divided by.
    """
    sequence, head = tl.program_id(0) // KV_HEADS, tl.program_id(0) % KV_HEADS
    first_row, part = tl.program_id(1) * ROWS, tl.program_id(2)
    first = tl.load(ends + sequence)
    count = tl.load(ends + sequence + 1) - first
    if first_row >= count * GROUP:
        return
    before = tl.load(key_counts + sequence) - count
    rows = first_row + tl.arange(0, ROWS)
    token = rows // GROUP
    real = token < count
    position = before + token
    begin = part * PART
    end = tl.minimum(
        before + tl.minimum((first_row + ROWS - 1) // GROUP, count - 1) + 1, begin + PART
    )
    if WINDOWED:
        begin = tl.maximum(begin, (before + first_row // GROUP - window + 1) // KEYS * KEYS)
    if begin >= end:
        return
    key_lanes, value_lanes = tl.arange(0, KEY_LANES), tl.arange(0, VALUE_LANES)
    row_at = (first + token).to(tl.int64) * (KV_HEADS * GROUP) + head * GROUP + rows % GROUP
    query_mask = real[:, None] & (key_lanes < KEY_SIZE)[None, :]
    q = tl.load(query + row_at[:, None] * KEY_SIZE + key_lanes[None, :], mask=query_mask, other=0.0)
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sum_of_values = tl.zeros([ROWS, VALUE_LANES], tl.float32)
    for start in range(begin, end, KEYS):
        at = start + tl.arange(0, KEYS)
        page = tl.load(table + sequence * width + at // PAGE_SIZE, mask=at < end, other=0)
        slot = (page.to(tl.int64) * PAGE_SIZE + at % PAGE_SIZE) * KV_HEADS + head
        key_mask = (at < end)[None, :] & (key_lanes < KEY_SIZE)[:, None]
        k = tl.load(keys + slot[None, :] * KEY_SIZE + key_lanes[:, None], mask=key_mask, other=0.0)
        scores = _scores(q, k, at, position, scale, window, softcap, WINDOWED, CAPPED, EXACT)
        value_mask = (at < end)[:, None] & (value_lanes < VALUE_SIZE)[None, :]
        v = tl.load(
            values + slot[:, None] * VALUE_SIZE + value_lanes[None, :], mask=value_mask, other=0.0
        )
        maximum, total, sum_of_values = _fold(scores, v, maximum, total, sum_of_values, EXACT)
    total = tl.where(
        total == 0, 1.0, total
    )  # of a row that sees none of the part's keys, whose maximum stays -inf
    result = sum_of_values / total[:, None]
    row_at += part.to(tl.int64) * token_count * (KV_HEADS * GROUP)
    out_mask = real[:, None] & (value_lanes < VALUE_SIZE)[None, :]
    tl.store(
        out + row_at[:, None] * VALUE_SIZE + value_lanes[None, :],
        result.to(out.dtype.element_ty),
        mask=out_mask,
    )
    tl.store(sums + row_at, maximum + tl.log(total), mask=real)


# What varies from step to step must not have a kernel compiled anew.
@triton.jit(  # type: ignore[untyped-decorator]  # Triton has no types
    do_not_specialize=["row_count"], do_not_specialize_on_alignment=["positions"]
)
def _join(  # type: ignore[no-untyped-def]  # as above
    parts,
    sums,
    out,
    positions,
    row_count,
    window,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    LANES: tl.constexpr,
    PART: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """One row of `out`, [T, heads, value size], from the parts that it sees."""
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + row // HEADS).to(tl.int32)
    first = 0
    if WINDOWED:
        first = tl.maximum(position - window + 1, 0) // PART
    lanes = tl.arange(0, LANES)
    maximum, total = tl.full((), float("-inf"), tl.float32), tl.full((), 0.0, tl.float32)
    whole = tl.zeros([LANES], tl.float32)
    for part in range(first, position // PART + 1):
        at = part * row_count + row
        logarithm = tl.load(sums + at)
        highest = tl.maximum(maximum, logarithm)
        kept, weight = tl.exp(maximum - highest), tl.exp(logarithm - highest)
        total = total * kept + weight
        whole = whole * kept + weight * tl.load(
            parts + at * SIZE + lanes, mask=lanes < SIZE, other=0.0
        )
        maximum = highest
    tl.store(out + row * SIZE + lanes, (whole / total).to(out.dtype.element_ty), mask=lanes < SIZE)


def part_length(most_keys: int) -> int:
    """Keys of a part where texts have up to `most_keys`."""
    length = _PART
    while length * _PARTS < most_keys:
        length *= 2
    return length


def tile(longest: int, group: int, lanes: int, dtype: torch.dtype) -> tuple[int, int]:
    """Query rows and keys of a tile."""
    # Without tensor cores more rows would not fit the registers.
    sizes = _ROWS[:1] if dtype is torch.float32 else _ROWS
    rows = next((rows for rows in sizes if longest * group <= rows), sizes[-1])
    return rows, max(16, min(64, _TILE_BYTES // (lanes * dtype.itemsize)))


def lanes(size: int) -> int:
    """What a head of so many numbers is padded to."""
    return max(16, 1 << (size - 1).bit_length())


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
    """Attention [T, H, value size] of a packed batch over caches [pages, page size, KV heads, size], each token over the keys up to
    its own, or the last `window` of them. No text has more than `most_keys`, which decides how texts are divided."""
    query_THD = query_THD.contiguous()
    tokens, heads, size = query_THD.shape
    _, page_size, kv_heads, value_size = values.shape
    group, part = heads // kv_heads, part_length(most_keys)
    rows, tile_keys = tile(batch.longest, group, lanes(max(size, value_size)), query_THD.dtype)
    whole = most_keys <= part
    part_count = 1 if whole else -(-batch.block_table.shape[1] * page_size // part)
    out = query_THD.new_empty(tokens, heads, value_size)
    parts = (
        out if whole else out.new_empty(part_count, tokens, heads, value_size, dtype=torch.float32)
    )
    sums = out.new_empty(part_count, tokens, heads, dtype=torch.float32)
    _attend[len(batch.key_counts) * kv_heads, -(-batch.longest * group // rows), part_count](
        query_THD, keys, values, parts, sums, batch.ends, batch.key_counts, batch.block_table, batch.block_table.shape[1], tokens,
        scale, window or 0, softcap or 0.0,
        GROUP=group, KV_HEADS=kv_heads, KEY_SIZE=size, VALUE_SIZE=value_size, KEY_LANES=lanes(size), VALUE_LANES=lanes(value_size),
        PAGE_SIZE=page_size, ROWS=rows, KEYS=tile_keys, PART=part,
        WINDOWED=window is not None, CAPPED=softcap is not None, EXACT=query_THD.dtype is torch.float32,
    )  # fmt: skip
    if not whole:
        _join[(tokens * heads,)](
            parts, sums, out, batch.positions, tokens * heads, window or 0,
            HEADS=heads, SIZE=value_size, LANES=lanes(value_size), PART=part, WINDOWED=window is not None,
        )  # fmt: skip
    return out
