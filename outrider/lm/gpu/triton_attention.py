"""Attention over the paged cache on a GPU: a Triton kernel for decoding, verification and prefill.

The softmax takes one pass over the keys (FlashAttention-2, Dao, arXiv 2307.08691). The rows of a
tile are a slice's tokens times the query heads that share a key/value head, so each key is read
once for all of them. Long sequences are split over their keys, and a second kernel joins the parts
(Flash-Decoding, Dao et al. 2023). The split depends on slots alone.

A slot is a token's place among its sequence's keys. Tokens of a tree lie behind the text, so their
slots are not their positions. Tiles of keys that end before the tree are computed as for a chain.
Tiles begin at multiples of their length, wherever the tree begins: a tree's first path, which has
the slots of a chain, gets the very result of that chain.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from outrider.lm.layout import KernelArguments

# Query rows of a tile; tensor cores need at least 16.
_ROWS = (16, 32, 64)
# Bytes of a tile of keys. Three such tiles in flight fit the 99 KiB of shared memory that a
# multiprocessor of the Ada generation has.
_TILE_BYTES = 2**14
# Least keys of a part, and most parts of a sequence.
_MIN_PART = 1024
_MAX_PARTS = 16


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _scores(  # type: ignore[no-untyped-def]  # the arguments are Triton tensors
    q, k, scale, softcap, CAPPED: tl.constexpr, EXACT: tl.constexpr
):
    """Return the scores [rows, keys]."""
    scores = tl.dot(q, k, input_precision="ieee" if EXACT else "tf32") * scale
    if CAPPED:
        # tanh by way of exp, because Triton has no tanh.
        scores = softcap * (1 - 2 / (1 + tl.exp(2 * scores / softcap)))
    return scores


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _is_seen(  # type: ignore[no-untyped-def]  # the arguments are Triton tensors
    at, slot, position, window, WINDOWED: tl.constexpr
):
    """Return which keys in the slots `at` each row sees, as if all its tokens were text.

    Of a tree's keys a row sees only its ancestors. An ancestor's slot is never before its position,
    so no ancestor within the window is missing.
    """
    seen = at[None, :] <= slot[:, None]
    if WINDOWED:
        seen = seen & (at[None, :] > position[:, None] - window)
    return seen


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _tile_scores(  # type: ignore[no-untyped-def]  # the arguments are Triton tensors and numbers
    q, k, start, at, slot, position, tree_tile, tree_start, words, scale, window, softcap,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, TREES: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Return the scores [rows, keys] of the tile of slots `at` from `start`; -inf where unseen."""
    scores = _scores(q, k, scale, softcap, CAPPED, EXACT)
    seen = _is_seen(at, slot, position, window, WINDOWED)
    scores = tl.where(seen, scores, float("-inf"))
    # A constant condition first: it decides whether the code exists.
    if TREES:  # noqa: SIM102
        if start >= tree_tile:
            seen = _is_text_or_ancestor(at, tree_start, words)
            scores = tl.where(seen, scores, float("-inf"))
    return scores


@triton.jit
def _visible_ancestors(  # type: ignore[no-untyped-def]  # the arguments are Triton tensors
    words, depth, window
):
    """Return each row's word of ancestors without those that lie before its window.

    A word of a token of depth d has d bits, its own included. Ancestors come before their
    descendants, so the lowest bits are the farthest; all but the highest `window` are cleared.
    """
    # A word has at most 64 bits: nothing is cleared for the usual windows.
    for cleared in range(64 - window):
        words = tl.where(depth - window > cleared, words & (words - 1), words)
    return words


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _ancestors(  # type: ignore[no-untyped-def]  # the arguments are Triton pointers and tensors
    ancestors, positions, at, slot, real, tree_start, window,
    WINDOWED: tl.constexpr, TREES: tl.constexpr,
):  # fmt: skip
    """Return each row's position, and its word of the ancestors that it sees, if there are trees.

    `at` is each row's token in the batch. Without trees a position is the slot.
    """
    position = slot
    words = slot
    if TREES:
        words = tl.load(ancestors + at, mask=real & (slot >= tree_start), other=0)
        if WINDOWED:
            position = tl.load(positions + at, mask=real, other=0)
            words = _visible_ancestors(words, position - tree_start + 1, window)
    return position, words


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _fold(  # type: ignore[no-untyped-def]  # the arguments are Triton tensors
    scores, v, maximum, total, weighted, EXACT: tl.constexpr
):
    """Add a tile of keys to each row's maximum score, total weight and weighted sum of values."""
    highest = tl.maximum(maximum, tl.max(scores, 1))
    # A row that has seen no key yet has a maximum of -inf; -inf - -inf would be NaN.
    base = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp(scores - base[:, None])
    kept = tl.exp(maximum - base)
    product = tl.dot(weights.to(v.dtype), v, input_precision="ieee" if EXACT else "tf32")
    return highest, total * kept + tl.sum(weights, 1), weighted * kept[:, None] + product


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _load(  # type: ignore[no-untyped-def]  # the arguments are Triton pointers and tensors
    rows, at, lanes, real, SIZE: tl.constexpr
):
    """Load heads of `SIZE` numbers, padded with zeros; the arguments broadcast to a tile."""
    return tl.load(rows + at * SIZE + lanes, mask=real & (lanes < SIZE), other=0.0)


@triton.jit
def _sequence(cu_seqlens_q, seq_lens, tree_starts, number):  # type: ignore[no-untyped-def]  # pointers
    """Return first token in the batch, number of tokens, slots before them, start of the tree."""
    first = tl.load(cu_seqlens_q + number)
    count = tl.load(cu_seqlens_q + number + 1) - first
    return first, count, tl.load(seq_lens + number) - count, tl.load(tree_starts + number)


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _key_rows(  # type: ignore[no-untyped-def]  # the arguments are Triton pointers and tensors
    pages, at, end, head, PAGE_SIZE: tl.constexpr, KV_HEADS: tl.constexpr
):
    """Return where the cache has a head's keys for the slots `at`, counted in heads."""
    page = tl.load(pages + at // PAGE_SIZE, mask=at < end, other=0)
    return (page.to(tl.int64) * PAGE_SIZE + at % PAGE_SIZE) * KV_HEADS + head


@triton.jit
def _is_text_or_ancestor(  # type: ignore[no-untyped-def]  # the arguments are Triton tensors
    at, tree_start, words
):
    """Return which keys in the slots `at` are text or in each row's word, [rows, keys].

    The result is arbitrary for keys behind the tree, which no row sees.
    """
    # Shifts by less than 0 or more than 63 are undefined.
    bit = ((at - tree_start) & 63).to(tl.int64)
    return (at < tree_start)[None, :] | ((words[:, None] >> bit[None, :]) & 1 != 0)


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _key_range(  # type: ignore[no-untyped-def]  # the arguments are Triton numbers
    part, before, count, first_row, tree_start, window, GROUP: tl.constexpr, ROWS: tl.constexpr,
    PART: tl.constexpr, KEYS: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """Return the slots of a part's keys that a tile of rows sees: begin, tree's tile, end.

    The sequence's `count` tokens have the slots from `before` on. Keys from the second number on
    are in tiles that overlap the tree. Without such tiles, the second number equals the end.
    """
    first_token = first_row // GROUP
    last_token = tl.minimum((first_row + ROWS - 1) // GROUP, count - 1)
    begin = part * PART
    end = tl.minimum(before + last_token + 1, begin + PART)
    if WINDOWED:
        # All positions of a tree are `tree_start` or later, in any order.
        first_position = tl.minimum(before + first_token, tree_start)
        begin = tl.maximum(begin, (first_position - window + 1) // KEYS * KEYS)
    tree_tile = tl.maximum(begin, tree_start // KEYS * KEYS)
    return begin, tl.where(tree_start < end, tree_tile, end), end


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _store(  # type: ignore[no-untyped-def]  # the arguments are Triton pointers and tensors
    out, log_totals, row_at, lanes, real, maximum, total, weighted, SIZE: tl.constexpr
):
    """Store the rows of a part, normalised by itself, and the logarithms of the divisors."""
    # A row that sees no key of this part has a total of 0; its maximum stays -inf.
    total = tl.where(total == 0, 1.0, total)
    result = (weighted / total[:, None]).to(out.dtype.element_ty)
    out_at = row_at[:, None] * SIZE + lanes[None, :]
    tl.store(out + out_at, result, mask=real[:, None] & (lanes < SIZE)[None, :])
    tl.store(log_totals + row_at, maximum + tl.log(total), mask=real)


# Arguments that vary from step to step must not cause a new compilation.
@triton.jit(  # type: ignore[untyped-decorator]  # Triton has no types
    do_not_specialize=["width", "token_count"],
    do_not_specialize_on_alignment=[
        "cu_seqlens_q",
        "seq_lens",
        "block_table",
        "positions",
        "tree_starts",
        "ancestors",
    ],
)
def _attend(  # type: ignore[no-untyped-def]  # the arguments are Triton pointers and numbers
    query, keys, values, out, log_totals, cu_seqlens_q, seq_lens, block_table,
    positions, tree_starts, ancestors, width, token_count, scale, window, softcap,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
    KEY_LANES: tl.constexpr, VALUE_LANES: tl.constexpr, PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PART: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, TREES: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Attend for one tile of rows of one sequence and key/value head, over one part of the keys.

    `out` is [parts, T, heads, value size], and `log_totals` [parts, T, heads], see `_store`.
    """
    sequence = tl.program_id(0) // KV_HEADS
    head = tl.program_id(0) % KV_HEADS
    first_row = tl.program_id(1) * ROWS
    part = tl.program_id(2)
    first, count, before, tree_start = _sequence(cu_seqlens_q, seq_lens, tree_starts, sequence)
    if first_row >= count * GROUP:
        return
    rows = first_row + tl.arange(0, ROWS)
    token = rows // GROUP
    real = token < count
    slot = before + token
    begin, tree_tile, end = _key_range(
        part, before, count, first_row, tree_start, window, GROUP, ROWS, PART, KEYS, WINDOWED
    )
    if begin >= end:
        return
    key_lanes = tl.arange(0, KEY_LANES)
    value_lanes = tl.arange(0, VALUE_LANES)
    row_at = (first + token).to(tl.int64) * (KV_HEADS * GROUP) + head * GROUP + rows % GROUP
    q = _load(query, row_at[:, None], key_lanes[None, :], real[:, None], KEY_SIZE)
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    weighted = tl.zeros([ROWS, VALUE_LANES], tl.float32)
    position, words = _ancestors(
        ancestors, positions, first + token, slot, real, tree_start, window, WINDOWED, TREES
    )
    for start in range(begin, end, KEYS):
        at = start + tl.arange(0, KEYS)
        key_at = _key_rows(block_table + sequence * width, at, end, head, PAGE_SIZE, KV_HEADS)
        k = _load(keys, key_at[None, :], key_lanes[:, None], (at < end)[None, :], KEY_SIZE)
        scores = _tile_scores(
            q, k, start, at, slot, position, tree_tile, tree_start, words, scale, window, softcap,
            WINDOWED, CAPPED, TREES, EXACT,
        )  # fmt: skip
        v = _load(values, key_at[:, None], value_lanes[None, :], (at < end)[:, None], VALUE_SIZE)
        maximum, total, weighted = _fold(scores, v, maximum, total, weighted, EXACT)
    row_at += part.to(tl.int64) * token_count * (KV_HEADS * GROUP)
    _store(out, log_totals, row_at, value_lanes, real, maximum, total, weighted, VALUE_SIZE)


# Arguments that vary from step to step must not cause a new compilation.
@triton.jit(  # type: ignore[untyped-decorator]  # Triton has no types
    do_not_specialize=["row_count"], do_not_specialize_on_alignment=["slots", "positions"]
)
def _join(  # type: ignore[no-untyped-def]  # the arguments are Triton pointers and numbers
    parts,
    log_totals,
    out,
    slots,
    positions,
    row_count,
    window,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    LANES: tl.constexpr,
    PART: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """Join the parts that one row sees into `out` [T, heads, value size].

    Starts with the last part, in which the row sees at least its own key. So the maximum is finite
    before a part in which a token of a tree sees no key.
    """
    row = tl.program_id(0).to(tl.int64)
    last = tl.load(slots + row // HEADS) // PART
    first = 0
    if WINDOWED:
        position = tl.load(positions + row // HEADS)
        first = tl.maximum(position - window + 1, 0) // PART
    lanes = tl.arange(0, LANES)
    maximum = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    weighted = tl.zeros([LANES], tl.float32)
    for before in range(last + 1 - first):
        at = (last - before) * row_count + row
        log_total = tl.load(log_totals + at)
        highest = tl.maximum(maximum, log_total)
        kept = tl.exp(maximum - highest)
        weight = tl.exp(log_total - highest)
        total = total * kept + weight
        values = tl.load(parts + at * SIZE + lanes, mask=lanes < SIZE, other=0.0)
        weighted = weighted * kept + weight * values
        maximum = highest
    result = weighted / total
    tl.store(out + row * SIZE + lanes, result.to(out.dtype.element_ty), mask=lanes < SIZE)


def part_length(max_seq_len: int) -> int:
    """Return the keys of a part, for sequences of up to `max_seq_len` tokens."""
    length = _MIN_PART
    while length * _MAX_PARTS < max_seq_len:
        length *= 2
    return length


def tile_shape(max_seqlen_q: int, group: int, lanes: int, dtype: torch.dtype) -> tuple[int, int]:
    """Return the query rows and the keys of a tile.

    `group` query heads share a key/value head; a head is padded to `lanes` numbers.
    """
    # float32 uses no tensor cores, and more rows would not fit the registers.
    sizes = _ROWS[:1] if dtype is torch.float32 else _ROWS
    rows = next((rows for rows in sizes if max_seqlen_q * group <= rows), sizes[-1])
    return rows, max(16, min(64, _TILE_BYTES // (lanes * dtype.itemsize)))


def padded_lanes(size: int) -> int:
    """Return the power of two, at least 16, to which a head of `size` numbers is padded."""
    return max(16, 1 << (size - 1).bit_length())


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
    """Attend for a packed batch over caches [pages, page size, KV heads, size].

    Return [T, H, value size]. Each token sees the text up to its own slot, and in a tree its
    ancestors and itself; with a `window`, the last so many positions of these. No sequence has more
    than `max_seq_len` keys, which decides how keys are split.
    """
    query_THD = query_THD.contiguous()
    tokens, heads, size = query_THD.shape
    _, page_size, kv_heads, value_size = values.shape
    group = heads // kv_heads
    part = part_length(max_seq_len)
    lanes = padded_lanes(max(size, value_size))
    rows, tile_keys = tile_shape(batch.max_seqlen_q, group, lanes, query_THD.dtype)
    single_part = max_seq_len <= part
    width = batch.block_table.shape[1]
    part_count = 1 if single_part else -(-width * page_size // part)
    out = query_THD.new_empty(tokens, heads, value_size)
    parts = out
    if not single_part:
        parts = out.new_empty(part_count, tokens, heads, value_size, dtype=torch.float32)
    log_totals = out.new_empty(part_count, tokens, heads, dtype=torch.float32)
    row_tiles = -(-batch.max_seqlen_q * group // rows)
    _attend[len(batch.seq_lens) * kv_heads, row_tiles, part_count](
        query_THD, keys, values, parts, log_totals, batch.cu_seqlens_q, batch.seq_lens,
        batch.block_table, batch.positions, batch.tree_starts, batch.ancestors,
        width, tokens, scale, window or 0, softcap or 0.0,
        GROUP=group, KV_HEADS=kv_heads, KEY_SIZE=size, VALUE_SIZE=value_size,
        KEY_LANES=padded_lanes(size), VALUE_LANES=padded_lanes(value_size),
        PAGE_SIZE=page_size, ROWS=rows, KEYS=tile_keys, PART=part,
        WINDOWED=window is not None, CAPPED=softcap is not None, TREES=batch.has_trees,
        EXACT=query_THD.dtype is torch.float32,
    )  # fmt: skip
    if not single_part:
        _join[(tokens * heads,)](
            parts, log_totals, out, batch.slots, batch.positions, tokens * heads, window or 0,
            HEADS=heads, SIZE=value_size, LANES=padded_lanes(value_size), PART=part,
            WINDOWED=window is not None,
        )  # fmt: skip
    return out
